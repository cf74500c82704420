"""Who may call a replica."""

from __future__ import annotations

import pytest

from rollmill.errors import ConfigError
from rollmill.generator import security
from rollmill.generator.security import Access, TlsFiles, admits, check_binding, read_token

TOKEN = "sesame-open-sesame"


def tls(folder, *, ca: bool = False) -> TlsFiles:
    return TlsFiles(cert=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem" if ca else None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_nothing(host):
    assert check_binding(host, access=Access()) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node-1", "localhost.evil.example"])
def test_every_other_interface_is_refused_without_a_token_or_client_certificates(host, tmp_path):
    for access in (Access(), Access(tls=tls(tmp_path))):
        with pytest.raises(ConfigError) as refused:
            check_binding(host, access=access)
        assert "--token-file" in str(refused.value)
        assert "--tls-client-ca" in str(refused.value)


def test_a_token_or_client_certificates_let_a_replica_leave_loopback(tmp_path):
    assert check_binding("0.0.0.0", access=Access(token=TOKEN, tls=tls(tmp_path))) is None
    assert check_binding("0.0.0.0", access=Access(tls=tls(tmp_path, ca=True))) is None


def test_a_token_in_clear_on_a_network_is_said():
    assert "in clear" in str(check_binding("0.0.0.0", access=Access(token=TOKEN)))


@pytest.mark.parametrize(
    ("header", "admitted"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer {TOKEN}", True),
        (f"Bearer {TOKEN}".encode(), True),
        (None, False),
        ("", False),
        (TOKEN, False),
        (f"Basic {TOKEN}", False),
        (f"Bearer {TOKEN}x", False),
        (f"Bearer {TOKEN[:-1]}", False),
        ("Bearer ", False),
        ("Bearer \u00e9", False),
    ],
)
def test_only_the_very_token_admits(header, admitted):
    assert admits(header, token=TOKEN) is admitted


def test_what_the_client_sends_is_what_the_server_admits():
    assert admits(security.bearer(TOKEN), token=TOKEN)


def test_a_token_is_one_word_in_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file) == TOKEN


@pytest.mark.parametrize("text", ["", "short", "two words of a token", "first-line-of-it\nsecond-line-of-it"])
def test_what_is_no_token_is_refused_with_the_way_to_make_one(tmp_path, text):
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"secrets\.token_urlsafe"):
        read_token(file)


def test_a_token_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        read_token(tmp_path / "missing")


def test_a_certificate_without_its_key_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="certificate was given without its key"):
        TlsFiles(cert=tmp_path / "cert.pem")
    with pytest.raises(ConfigError, match="key was given without its certificate"):
        TlsFiles(key=tmp_path / "key.pem")


def test_a_server_without_a_certificate_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key"):
        Access(tls=TlsFiles(ca=tmp_path / "ca.pem"))


def test_a_tls_file_that_is_no_pem_or_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cert\.pem cannot be read"):
        tls(tmp_path).read()
    (tmp_path / "cert.pem").write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"cert\.pem is no PEM file"):
        tls(tmp_path).read()
