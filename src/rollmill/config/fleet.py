"""A generator that outlives the run and may serve others: where it is, and whose requests these are. Pure; no torch.

The section `[generator.fleet]` of a run. With an address the run starts no replicas: they stand behind a router, or
one is served alone, and follow the model repository of the run (`rollmill serve --repository RUN`, or
`--adapter NAME=RUN`).
"""

from __future__ import annotations

from rollmill.config.section import Section, knob


class FleetSettings(Section):
    """The fleet that a run is served by."""

    address: str = knob("")
    """`HOST:PORT` of a router, or of one replica. Empty: the run starts `generator.replicas` of its own; with an
    address it starts none, and what the fleet's engines do is set where they are started."""
    job: str = knob("")
    """Under which name the router knows this run: for its priority, its quota, and replicas that serve it alone."""
    adapter: str = knob("")
    """Name under which the fleet serves this run's adapter (`rollmill serve --adapter NAME=RUN`), for several runs with
    `trainer.lora_rank` on one base. Empty: its replicas serve whole weights (`--repository RUN`)."""
    slots: int | None = knob(
        None, unit="rollouts", raising="more of the fleet at once", lowering="leaves more to other jobs", ge=1
    )
    """Most rollouts in flight there at once. `None`: as many as its serving replicas have places."""
    load_deadline_s: float = knob(
        600.0, unit="s", raising="tolerates a larger or slower fleet", lowering="a stuck update ends sooner", gt=0
    )
    """An update of the whole fleet, which loads a few replicas at a time, fails after this long."""
    lost_deadline_s: float = knob(
        600.0, unit="s", raising="tolerates longer outages", lowering="the run ends sooner", gt=0
    )
    """Longest wait for a fleet that cannot be reached, or none of whose replicas serves, at the start and later."""
    token_file: str | None = knob(None)
    """File with the bearer token that the fleet asks for. The token itself never stands in a configuration."""
    tls: bool = knob(False)
    """Encrypt. Without `tls_ca` the system's authorities are trusted."""
    tls_ca: str | None = knob(None)
    """Authority of the fleet's certificate, PEM."""
    tls_cert: str | None = knob(None)
    """This run's own certificate, PEM, for a fleet with mTLS."""
    tls_key: str | None = knob(None)
    """Its private key, PEM."""
    tls_server_name: str = knob("")
    """The name in the fleet's certificate, where it is not the address."""
