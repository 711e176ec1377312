"""A client of the REST API: `Client` and `AsyncClient`."""

from forebay.api.client.calls import Call
from forebay.api.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Call", "Client"]
