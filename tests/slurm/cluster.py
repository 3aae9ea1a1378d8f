"""A Slurm of its own on this machine: munged, slurmctld and a slurmd for each of four emulated
nodes; no systemd.

The nodes are this machine four times, told apart by ports. Packages come from apt where they are
missing. Everything lies in one folder and is stopped by the pid files in it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests import packages

NODES = 4
CPUS_PER_NODE = 2
MAX_ARRAY_SIZE = 1001
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_PATIENCE_S = 90.0


class Unavailable(Exception):
    """Why there can be no cluster here."""


def install() -> None:
    """See to it that Slurm's programs are here; Unavailable, with the reason, if they cannot be."""
    if os.geteuid() != 0:
        raise Unavailable("a private Slurm needs root")
    try:
        packages.install(PACKAGES, ("slurmctld", "slurmd", "sbatch", "munged", "runuser"))
    except packages.Unavailable as reason:
        raise Unavailable(f"Slurm: {reason}") from None


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Cluster:
    """Up once `start` returned, until `stop`. `environment`: what makes sbatch, squeue and scontrol
    speak to it."""

    def __init__(self, root: Path):
        self.root = root
        self.conf = root / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        for name in ("state", "log", "run", "spool", "munge"):
            (self.root / name).mkdir(parents=True)
        for folder in (self.root, *self.root.parents):
            if folder.stat().st_mode & 0o022 and not folder.stat().st_mode & 0o1000:
                raise Unavailable(f"munged refuses to run below {folder}, which others can write")
        self._start_munge()
        self._write_conf(*free_ports(1 + NODES))
        self.start_controller()
        for i in range(NODES):
            self._run("slurmd", "-f", str(self.conf), "-N", f"n{i}")
        self.until(
            lambda: len(set(self.run("sinfo", "-hN", "-t", "idle", "-o", "%N").split())) == NODES,
            30,
        )

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        folder.chmod(0o755)
        for path in (folder, key):
            shutil.chown(path, "munge", "munge")
        files = {
            "socket": "socket",
            "key-file": "key",
            "log-file": "log",
            "pid-file": "pid",
            "seed-file": "seed",
        }
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        self._run(
            "runuser", "-u", "munge", "--", shutil.which("munged") or "munged", "--force", *options
        )

    def _write_conf(self, controller: int, *nodes: int) -> None:
        host, root = socket.gethostname().split(".")[0], self.root
        settings = {
            "ClusterName": "packprep",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": controller,
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={root}/munge/socket",
            "CryptoType": "crypto/munge",
            "StateSaveLocation": root / "state",
            "SlurmdSpoolDir": f"{root}/spool/%n",
            "SlurmctldPidFile": root / "run" / "slurmctld.pid",
            "SlurmdPidFile": f"{root}/run/slurmd-%n.pid",
            "SlurmctldLogFile": root / "log" / "slurmctld",
            "SlurmdLogFile": f"{root}/log/slurmd-%n",
            # No cgroups and no affinity, as in a container.
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "MpiDefault": "none",
            "SlurmdParameters": "config_overrides",  # believe the nodes below, not this machine
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SchedulerParameters": (
                "sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0"
            ),
            "MaxArraySize": MAX_ARRAY_SIZE,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "JobRequeue": 1,
            "KillWait": 5,
            "MinJobAge": 3600,  # ended jobs stay to be asked about
            "ReturnToService": 2,
            "InactiveLimit": 0,
            "Waittime": 0,
            "MailProg": "/bin/true",
            "AccountingStorageType": "accounting_storage/none",
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines += [
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE}"
            f" Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1"
            " RealMemory=64000 State=UNKNOWN"
            for i, port in enumerate(nodes)
        ]
        whole = f"Nodes=n[0-{NODES - 1}] MaxTime=INFINITE State=UP"
        lines.append(f"PartitionName=main {whole} Default=YES PriorityTier=10 PreemptMode=off")
        lines.append(
            f"PartitionName=spare {whole} Default=NO PriorityTier=1 PreemptMode=requeue"
            " GraceTime=20"
        )
        self.conf.write_text("\n".join(lines) + "\n")

    def start_controller(self) -> None:
        """Start slurmctld, which goes on with the state that it had."""
        self._run("slurmctld", "-f", str(self.conf))
        self.until(lambda: self._try("scontrol", "ping").stdout.count(" is UP"))

    def until_saved(self) -> None:
        """Wait until the controller has written what it knows of the jobs: it does so some seconds
        late."""
        begun, file = time.time(), self.root / "state" / "job_state"
        self.until(lambda: file.exists() and file.stat().st_mtime > begun)

    def kill_controller(self) -> None:
        """SIGKILL to slurmctld."""
        pid = self._pid(self.root / "run" / "slurmctld.pid")
        assert pid
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: not is_running(pid))
        (self.root / "run" / "slurmctld.pid").unlink()

    def stop(self) -> None:
        """Cancel what runs and end all that belongs to this cluster, though it never came up, or a
        test left it in ruins."""
        if self._try("scontrol", "ping").stdout.count(" is UP"):
            self._try("scancel", "--user=root")
            with contextlib.suppress(AssertionError):
                self.until(lambda: not self._try("squeue", "-h").stdout.strip(), 20)
        files = (
            *self.root.glob("run/slurmd-*.pid"),
            self.root / "run" / "slurmctld.pid",
            self.root / "munge" / "pid",
        )
        pids = [pid for pid in map(self._pid, files) if pid]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + 5
            while any(map(is_running, pids)) and time.monotonic() < deadline:
                time.sleep(0.05)
            pids = [pid for pid in (*pids, *self._steps()) if is_running(pid)]

    def _steps(self) -> list[int]:
        """What nodes have started and outlives them: processes that know this cluster by its
        configuration."""
        mark = b"SLURM_CONF=" + os.fsencode(self.conf)
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                found += (
                    [int(folder.name)]
                    if mark in (folder / "environ").read_bytes().split(b"\0")
                    else []
                )
        return found

    def run(self, *command: str, **options: object) -> str:
        """What a command says; AssertionError with what it says to stderr if it fails."""
        done = self._try(*command, **options)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def until(self, condition: Callable[[], object], patience: float = _PATIENCE_S) -> None:
        """Wait until a condition holds; AssertionError, with the queue and the controller's last
        words, if it never does."""
        deadline = time.monotonic() + patience
        while not condition():
            if time.monotonic() > deadline:
                log = self.root / "log" / "slurmctld"
                said = log.read_text()[-3000:] if log.exists() else ""
                raise AssertionError(
                    f"waited {patience:g} s\n{self._try('squeue', '--states=all').stdout}\n{said}"
                )
            time.sleep(0.1)

    def states(self, job: str) -> list[str]:
        """The states of a job, of an array those of its tasks in order of their numbers, as far as
        they have begun."""
        lines = self.run("squeue", "-hr", "-j", job, "--states=all", "-o", "%K %T").splitlines()
        numbered = [line.split() for line in lines if line.strip()]
        return [
            state
            for _, state in sorted(
                numbered, key=lambda pair: int(pair[0]) if pair[0].isdigit() else 0
            )
        ]

    def wait(self, *jobs: str, patience: float = _PATIENCE_S) -> None:
        """Until jobs have ended. A job that is requeued begins at once and not after Slurm's two
        minutes."""

        def ended() -> bool:
            states = [state for job in jobs for state in self.states(job)]
            if set(states) & {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}:
                for job in jobs:
                    self.hurry(job)
            return bool(states) and set(states) <= {
                "COMPLETED",
                "FAILED",
                "CANCELLED",
                "TIMEOUT",
                "NODE_FAIL",
                "PREEMPTED",
            }

        self.until(ended, patience)

    def hurry(self, job: str) -> None:
        """Let what was requeued begin at once."""
        waiting = self._try(
            "squeue", "-hr", "-j", job, "-t", "PENDING", "-o", "%i %r"
        ).stdout.splitlines()
        for line in waiting:
            name, _, reason = line.partition(" ")
            if reason == "BeginTime":
                self._try("scontrol", "update", f"JobId={name}", "StartTime=now")

    def _try(self, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
        settings = {
            "capture_output": True,
            "text": True,
            "timeout": 60,
            "env": {**os.environ, **self.environment},
        }
        return subprocess.run(command, **{**settings, **options})  # type: ignore[call-overload]

    def _run(self, *command: str) -> None:
        """Start a daemon, which goes to the background by itself and keeps none of our pipes."""
        with (self.root / "log" / "start").open("a+") as log:
            done = subprocess.run(
                command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=60,
            )
            log.seek(0)
            if done.returncode:
                raise Unavailable(f"{command[0]} does not start: {log.read().strip()[-500:]}")

    @staticmethod
    def _pid(file: Path) -> int | None:
        text = file.read_text().strip() if file.exists() else ""
        return int(text) if text.isdigit() else None


def quiet_environment(environment: dict[str, str]) -> dict[str, str]:
    """An environment without what a job of another Slurm may have left in it."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }
