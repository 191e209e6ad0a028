"""Certificates and keys for a federation on one machine, generated when it starts and valid for a month."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 30


def certificates(folder: Path, hosts: Sequence[str]) -> tuple[Path, Path, Path]:
    """A new authority and a server certificate for these hosts: the files of authority, certificate and its key."""
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _name("fedet local CA")
    ca = _certificate(root, root, authority.public_key(), authority, [], ca=True)
    leaf = _certificate(_name(hosts[0]), root, server.public_key(), authority, hosts, ca=False)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = folder / "ca.crt", folder / "server.crt", folder / "server.key"
    _write(files[0], ca.public_bytes(serialization.Encoding.PEM))
    _write(files[1], leaf.public_bytes(serialization.Encoding.PEM))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    _write(files[2], server.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    return files


def node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A node's key pair as `ssh-keygen -t ecdsa -b 384` makes it: the files of the private and the public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    private, public = folder / name, folder / f"{name}.pub"
    pem, ssh = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
    _write(private, key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()))
    _write(public, key.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH) + b"\n")
    return private, public


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    *,
    ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(identifier, critical=False).add_extension(authority, critical=False)
    builder = builder.add_extension(_usage(ca), critical=True)
    if not ca:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _usage(ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from the first byte on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
