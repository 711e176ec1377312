"""Every message on the local sockets: one struct each, MessagePack on the wire.

A client sends `Hello` first; a daemon of another VERSION refuses it by name. After that each
request has exactly one reply: the struct named in the request's docstring, or `Failure`.
Descriptors that travel along are named there too.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from forebay.core.errors import ProtocolError
from forebay.core.protocol.checkpoints import *
from forebay.core.protocol.faces import *
from forebay.core.protocol.message import *
from forebay.core.protocol.message import VERSION as VERSION
from forebay.core.protocol.message import Message as Message
from forebay.core.protocol.pacing import *
from forebay.core.protocol.staging import *

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    # Built from the classes above so that a new message cannot be forgotten here.
    reduce(or_, Message.__subclasses__())
)
encode = msgspec.msgpack.Encoder().encode


def decode(frame: bytes) -> Message:
    """Raises ProtocolError for anything that is not a message of this version."""
    try:
        message: Message = _decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError) as err:
        raise ProtocolError(
            f"a message could not be read: {err}", hint="are client and daemon of one version?"
        ) from err
    return message
