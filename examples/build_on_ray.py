"""Build one dataset with the tasks of a Ray cluster.

    pip install packprep ray
    python examples/build_on_ray.py recipe.toml packed --tasks 8 --cpus 2
    packprep verify packed

Each Ray task runs one task of a packprep array. If a task is stopped or its machine fails, Ray runs
it again, and it makes only the shards that are missing. All machines need the same paths or URLs.
"""

import argparse
import os
import subprocess
import sys

import ray


class Stopped(Exception):
    """A signal stopped the build at a safe point, with exit status 75."""


@ray.remote(max_retries=20, retry_exceptions=[Stopped])
def build_part(recipe: str, out: str, index: int, count: int, cpus: int) -> None:
    """Make the shards of array task `index` of `count`. The last task publishes the dataset."""
    command = [sys.executable, "-m", "packprep", "build", recipe, "--out", out]
    command += ["--array-index", str(index), "--array-count", str(count), "--workers", str(cpus)]
    status = subprocess.run(command).returncode  # Ray shows what it prints in the driver's output.
    if status == 75:
        raise Stopped(f"task {index}")
    if status:
        raise RuntimeError(f"task {index} failed with exit status {status}")  # It is not retried.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="a recipe, as for `packprep build`")
    parser.add_argument("out", help="the output folder, as a path or URL")
    parser.add_argument("--tasks", type=int, default=8, help="about four per machine")
    parser.add_argument("--cpus", type=int, default=1, help="worker processes of each task")
    args = parser.parse_args()
    recipe = os.path.abspath(args.recipe)
    out = args.out if "://" in args.out else os.path.abspath(args.out)
    ray.init()  # the cluster in RAY_ADDRESS, otherwise a new one on this machine
    task = build_part.options(num_cpus=args.cpus)
    ray.get([task.remote(recipe, out, i, args.tasks, args.cpus) for i in range(args.tasks)])


if __name__ == "__main__":
    main()
