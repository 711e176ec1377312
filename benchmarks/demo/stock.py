"""Reads a checkpoint with stock PyTorch. Run by `python -S`, with no Forebay on its path.

Usage: stock.py SITE_PACKAGES CHECKPOINT_FOLDER. Prints the SHA-256 of the model's tensors.
"""

import hashlib
import importlib.util
import sys

sys.path.append(sys.argv[1])
assert importlib.util.find_spec("forebay") is None, "Forebay must not be importable here"

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

reader = dcp.HuggingFaceStorageReader(sys.argv[2])
found = reader.read_metadata().state_dict_metadata
state = {
    name: torch.zeros(entry.size, dtype=entry.properties.dtype)
    for name, entry in found.items()
    if name.startswith("model.")
}
dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(sys.argv[2]))
digest = hashlib.sha256()
for name in sorted(state):
    digest.update(state[name].numpy().tobytes())
print(digest.hexdigest())
