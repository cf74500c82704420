"""`rollmill serve` refuses what cannot be served before it loads anything, in words."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rollmill.cli.app import cli


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["serve", *arguments])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "Give a token (--token-file FILE), or ask clients for certificates (mTLS"),
        (("--adapter", "runs/maths"), "'runs/maths' is not NAME=DIR with a new name"),
        (("--adapter", "a=x", "--adapter", "a=y"), "'a=y' is not NAME=DIR with a new name"),
        (("--token-file", "missing"), "the token file missing cannot be read"),
        (("--tls-cert", "cert.pem"), "certificate was given without its key"),
        (("--tls-client-ca", "ca.pem"), "TLS on a server needs a certificate"),
        (("--set", "generator.max_num_seq=3"), "generator.max_num_seqs"),
        (("--engine", "fake", "--set", "generator.tensor_parallel_size=2"), "generator.tensor_parallel_size"),
        (("--engine", "fake", "--model", "no-such-model-or-folder/at-all/anywhere"), "no-such-model"),
        (
            ("--engine", "fake", "--model", "tiny-llama", "--repository", "no-such-run"),
            "no model repository in no-such-run",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_next_action(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert message in refusal(*arguments, "--no-http")


def test_rules_of_training_do_not_bind_a_replica_that_trains_nothing(tmp_path):
    # A context longer than a trainer's micro-batch, and greedy sampling, are refused in training.
    message = refusal(
        "--set",
        "generator.max_model_len=4096",
        "--set",
        "sampling.temperature=0",
        "--repository",
        str(tmp_path),
        "--engine",
        "fake",
        "--model",
        "tiny-llama",
        "--no-http",
    )
    assert "no model repository" in message
