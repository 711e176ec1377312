"""A client of the REST API: `Client` and `AsyncClient`."""

from forebay.api.client.calls import Call
from forebay.api.client.client import TOKEN_VARIABLE, URL_VARIABLE, AsyncClient, Client

__all__ = ["TOKEN_VARIABLE", "URL_VARIABLE", "AsyncClient", "Call", "Client"]
