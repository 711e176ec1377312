"""What both daemons say and hear: the greeting, failure, done, and their state."""

from __future__ import annotations

import msgspec

from forebay.core.errors import ForebayError, from_code

VERSION = 1


class Message(msgspec.Struct, tag_field="kind", frozen=True):
    """Root of all messages."""


class Hello(Message, tag="hello", frozen=True):
    """-> Welcome."""

    role: str
    pid: int
    version: int = VERSION


class Welcome(Message, tag="welcome", frozen=True):
    daemon: str
    pid: int
    version: int = VERSION


class Failure(Message, tag="failure", frozen=True):
    """The request failed; the same error is raised at the client."""

    code: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, err: ForebayError) -> Failure:
        return cls(err.code, err.message, err.hint)

    def error(self) -> ForebayError:
        return from_code(self.code, self.message, self.hint)


class Done(Message, tag="done", frozen=True):
    """Nothing to say."""


class GetMetrics(Message, tag="get_metrics", frozen=True):
    """-> MetricsText."""


class MetricsText(Message, tag="metrics_text", frozen=True):
    text: str


class GetStatus(Message, tag="get_status", frozen=True):
    """-> StagerStatus or CheckpointStatus."""
