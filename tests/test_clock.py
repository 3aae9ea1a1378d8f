import pytest

from packprep import clock
from packprep.clock import Clock


@pytest.fixture
def now(monkeypatch):
    """What the clock on the wall says, to be set."""
    time = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: time[0])
    return time


def test_a_stage_inside_another_counts_for_itself_alone(now):
    measured = Clock()
    with measured.stage("write"):
        now[0] = 1.0
        with measured.stage("render"):
            now[0] = 3.0
        now[0] = 10.0
    assert measured.seconds == {"write": 8.0, "render": 2.0}


def test_a_generator_is_measured_step_by_step_and_gives_the_same(now):
    def slow():
        for i in range(3):
            now[0] += 1.0
            yield i

    measured, items = Clock(), []
    for item in measured.steps("read", slow()):
        now[0] += 100.0
        items.append(item)
    assert measured.seconds == {"read": 3.0} and items == [0, 1, 2]


def test_a_stage_that_fails_is_measured_all_the_same(now):
    measured = Clock()
    with pytest.raises(ValueError), measured.stage("read"):
        now[0] = 2.0
        raise ValueError
    with measured.stage("read"):
        now[0] = 3.0
    assert measured.take() == {"read": 3.0} and measured.take() == {}


def test_clocks_add_up():
    measured = Clock()
    measured.add({"read": 1.0, "write": 2.0})
    measured.add({"read": 0.5})
    assert measured.take() == {"read": 1.5, "write": 2.0}
