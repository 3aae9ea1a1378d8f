"""docs/guides/cluster.md: its jobs give tasks their places, and run stopped tasks again."""

import json
import re

import pytest

from packprep.building.array_tasks import array_position
from packprep.errors import Stopped
from tests import made

PAGE = (made.ROOT / "docs" / "guides" / "cluster.md").read_text("utf-8")
AGAIN = Stopped.exit_status


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)


def test_the_job_of_kubernetes_gives_each_pod_its_place_and_ignores_stopped_pods():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    spec = yaml.safe_load(blocks("yaml")[0])["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    command = container["command"]
    assert all(isinstance(word, str) for word in command) and command[:2] == ["packprep", "build"]
    count = int(command[command.index("--array-count") + 1])
    assert count == spec["completions"] and spec["completionMode"] == "Indexed"
    assert command[command.index("--workers") + 1] == container["resources"]["requests"]["cpu"]
    assert array_position(None, count, {"JOB_COMPLETION_INDEX": "7"}) == (7, count)
    # Kubernetes accepts a policy only for pods that are never restarted in place.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    ignored = spec["podFailurePolicy"]["rules"][0]
    assert ignored["action"] == "Ignore" and ignored["onExitCodes"]["values"] == [AGAIN]
    assert ignored["onExitCodes"]["containerName"] == container["name"]


def test_the_other_jobs_run_stopped_tasks_again():
    aws, google = map(json.loads, blocks("json"))
    assert {"onExitCode": str(AGAIN), "action": "RETRY"} in aws["retryStrategy"]["evaluateOnExit"]
    (policy,) = google["taskGroups"][0]["taskSpec"]["lifecyclePolicies"]
    assert AGAIN in policy["actionCondition"]["exitCodes"] and policy["action"] == "RETRY_TASK"
    scripts = "\n".join(blocks("bash"))
    assert f'[ "$status" = {AGAIN} ] && exit 99' in scripts and f"#BSUB -Q {AGAIN}" in scripts
    (last, count) = re.search(
        r"#PBS -N packprep -J 0-(\d+) .*?--array-count (\d+)", scripts, re.S
    ).groups()
    assert int(last) + 1 == int(count)
