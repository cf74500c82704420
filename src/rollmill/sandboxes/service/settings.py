"""Settings of the service."""

from __future__ import annotations

import math

from rollmill.errors import ConfigError
from rollmill.sandboxes.records import Record

_MIB = 1024**2


class ServiceSettings(Record, frozen=True, kw_only=True):
    """How one node serves its sandboxes.

    Attributes:
        owner: who holds the leases, in records and lists.
        default_timeout_s: life of a sandbox whose caller names no timeout, as the public SDK expects it.
        max_timeout_s: longest timeout that a caller may ask for; more is refused with 400.
        paused_ttl_s: how long a paused sandbox is kept. Raising it keeps more of them, each with its memory.
        max_lifetime_s: end of every sandbox, counted from its creation, pauses included, whatever is renewed.
        max_sandboxes: running, paused and starting at a time; more are answered with 429.
        grace_s: the provider's lease ends so much after the timeout: it is there for the case that this service hangs.
        create_s: longest wait for a place in the queue and for the start, where a pool stands in front of the provider;
            the public SDK waits 60 s for an answer.
        transition_s: longest that one pause, resume or kill may take.
        default_user: of commands and files whose caller names none; empty: `user` where the backend has users, else
            `root`.
        image_names: a template that the settings file does not name is taken for the name of an image that the backend
            knows, with the limits of an unnamed template; else it is refused.
        without_internet: a caller who asks for the internet gets a sandbox that has none, as all have; else the call is
            refused. Older versions of the public SDK, such as 2.45, always ask.
        max_body_bytes: of calls of the control API.
        max_message_bytes: of one message to a program or about files.
        max_upload_bytes: of one upload as a form, which is held in memory until it is whole. Files that are sent as
            they are go through, and are bounded by the sandbox's disk alone.
        body_s: longest wait for the next piece of a body.
        head_s: longest wait for the head of a request; connections that say nothing hold nothing.
        keepalive_s: an idle stream says so this often, unless its caller asks for another interval.
        stream_stall_s: a caller that takes nothing of a stream for so long loses the stream; its program goes on.
        connections: open at once; more are answered with 503.
        close_s: at the end, exchanges that run get so long before their connections are cut.
    """

    owner: str = "service"
    default_timeout_s: float = 300.0
    max_timeout_s: float = 86_400.0
    paused_ttl_s: float = 86_400.0
    max_lifetime_s: float = 7 * 86_400.0
    max_sandboxes: int = 1000
    grace_s: float = 30.0
    create_s: float = 50.0
    transition_s: float = 60.0
    default_user: str = ""
    image_names: bool = True
    without_internet: bool = False
    max_body_bytes: int = _MIB
    max_message_bytes: int = 16 * _MIB
    max_upload_bytes: int = 64 * _MIB
    body_s: float = 60.0
    head_s: float = 10.0
    keepalive_s: float = 90.0
    stream_stall_s: float = 30.0
    connections: int = 8192
    close_s: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, (str, bool)) and not 0 < value < math.inf:
                raise ConfigError(f"{name} of the sandbox service is {value}; it must be above 0 and finite")
        if self.default_timeout_s > self.max_timeout_s:
            raise ConfigError(
                f"default_timeout_s is {self.default_timeout_s:g} and max_timeout_s {self.max_timeout_s:g}: callers "
                "that name no timeout would be refused; lower the first or raise the second"
            )
