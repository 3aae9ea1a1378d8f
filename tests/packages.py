"""Programs that tests run and packprep does not need: from apt where they are missing, by root
alone."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


class Unavailable(Exception):
    """Why a program cannot be had here."""


def install(packages: Sequence[str], programs: Sequence[str]) -> None:
    """See to it that the programs are here, which these packages of Debian have; Unavailable if
    they cannot be."""
    if all(map(shutil.which, programs)):
        return
    if os.geteuid() != 0:
        raise Unavailable(f"{', '.join(packages)}: not installed, and only root can install it")
    if not shutil.which("apt-get"):
        raise Unavailable(
            f"{', '.join(packages)}: not installed, and there is no apt-get to install it"
        )
    # status 101: a package that is installed starts no service
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    quiet = {
        "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        "capture_output": True,
        "text": True,
    }
    try:
        for step in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", "-o", "DPkg::Lock::Timeout=120", *step], timeout=300, **quiet
            )
            if done.returncode:
                raise Unavailable(
                    f"apt-get {step[0]} failed: {(done.stderr or done.stdout).strip()[-300:]}"
                )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"apt-get took more than {error.timeout:g} s") from None
    finally:
        if ours:
            policy.unlink()
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        raise Unavailable(f"{', '.join(missing)}: not there after installing {', '.join(packages)}")
