"""The application with its commands, in the order in which its help lists them."""

from packprep.cli.application import app
from packprep.cli.building import build, plan, slurm, status
from packprep.cli.datasets import export, verify
from packprep.cli.inspecting import inspect

__all__ = ["app"]

for command in (build, plan, status, verify, inspect, export, slurm):
    app.command()(command)
