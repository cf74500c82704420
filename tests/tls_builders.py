"""Builders for tests with TLS: real certificates, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rollmill.generator.security import TlsFiles


def openssl(folder: Path, *arguments: str) -> None:
    command = shutil.which("openssl")
    if command is None:
        pytest.skip("openssl is not installed")
    subprocess.run([command, *arguments], cwd=folder, check=True, capture_output=True, timeout=30)


def certificates_in(folder: Path) -> Path:
    """Keys and certificates of an authority, a server and a client that it signed, and a client of nobody's."""
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:replica.test\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        openssl(folder, "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name in ("server", "client"):
        openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return folder


def tls(folder: Path, name: str | None = None, *, ca: bool = True) -> TlsFiles:
    return TlsFiles(
        cert=None if name is None else folder / f"{name}.pem",
        key=None if name is None else folder / f"{name}.key",
        ca=folder / "ca.pem" if ca else None,
    )
