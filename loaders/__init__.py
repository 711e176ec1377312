"""The trainer's side of staging: a drop-in DataLoader over shards that stagerd brings near.

from forebay.loaders import DataLoader, StagedDataset

dataset = StagedDataset("s3://bucket/train", fields=("png", "cls"), decode="auto")
for images, labels in DataLoader(dataset, batch_size=64, shuffle=True, seed=1):
    ...
"""

from forebay.loaders.collate import Padded, Ragged
from forebay.loaders.dataset import StagedDataset
from forebay.loaders.device import DevicePrefetcher
from forebay.loaders.images import Resized
from forebay.loaders.loader import DataLoader
from forebay.loaders.mixing import Mixture

__all__ = ["DataLoader", "DevicePrefetcher", "Mixture", "Padded", "Ragged", "Resized", "StagedDataset"]
