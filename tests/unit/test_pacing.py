"""What a rank measures, and what the reports of all ranks mean together."""

from __future__ import annotations

import threading

import pytest
import torch

from forebay.core.errors import InvalidRequest
from forebay.loaders.pacing import Pacing
from forebay.loaders.pacing.lockstep import Lockstep, alarm_of, judge, skews_of
from forebay.loaders.pacing.meter import StepMeter
from forebay.loaders.pacing.report import RankReport
from forebay.loaders.ready import ReadyQueue, size_of


def report(rank: int, **values: object) -> RankReport:
    known: dict[str, object] = {
        "rank": rank, "node": f"n{rank}", "step": 100, "wait_s": 0.0,
        "busy_s": 10.0, "bytes": 1000, "demand_bps": 100.0, "runway_s": 100.0,
    }  # fmt: skip
    return RankReport(**{**known, **values})  # type: ignore[arg-type]


def test_waits_and_work_are_told_apart():
    now = [0.0]
    meter = StepMeter(lambda: now[0])
    for wait_s, busy_s in ((1.0, 2.0), (0.5, 2.0), (0.0, 2.0)):
        meter.asked()
        now[0] += wait_s
        assert meter.given(600) == wait_s
        now[0] += busy_s
    meter.asked()
    now[0] += 7.0
    found = meter.measured()
    assert (found.step, found.wait_s, found.busy_s, found.bytes) == (3, 1.5, 6.0, 1800)
    assert found.waits_s == [1.0, 0.5, 0.0] and found.waiting_s == 7.0 and found.demand_bps == 300.0
    meter.stopped()
    assert meter.measured().waiting_s == 0.0


def test_skew_is_of_the_same_step_on_all_ranks():
    """Ranks are looked at in mid-step: their last waits are not of one step."""
    ahead = report(0, step=5, waits_s=[0.1, 0.2, 0.9])
    behind = report(1, step=4, waits_s=[0.5, 0.1, 0.2])
    assert skews_of([ahead, behind]) == pytest.approx([0.0, 0.0])
    assert skews_of([report(0, step=2, waits_s=[1.0]), report(1, step=9, waits_s=[1.0])]) == []


def test_a_shortage_of_storage_is_named_with_figures():
    before = [report(rank, step=0, busy_s=0.0, bytes=0) for rank in range(2)]
    short = [report(rank, wait_s=10.0, runway_s=0.2, demand_bps=2e9, bytes=10**10) for rank in range(2)]
    found = judge(short, before, 10.0, 100.0)
    assert found.storage_bound and found.wait_share == 0.5 and found.step_s == 0.2
    assert (found.needs_bps, found.has_bps) == (4e9, 2e9)
    assert "storage-bound: needs 3.7GiB/s, has 1.9GiB/s" in found.line() and found.worth_a_warning
    slow_decoding = [report(rank, wait_s=10.0, cause="decoding") for rank in range(2)]
    assert not judge(slow_decoding, before, 10.0, 100.0).storage_bound
    assert not judge([report(0), report(1)], before, 10.0, 100.0).worth_a_warning


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (
            "storage",
            "rank 1 on n1 has waited 250 s for step 101: storage: s3://b/7.tar is not here",
        ),
        ("decoding", "decoding"),
        ("network", "stagerd of its node does not answer"),
        ("", "unknown"),
    ],
)
def test_an_alarm_names_rank_node_tier_shard_and_cause(cause: str, words: str):
    waits = report(1, waiting_s=250.0, cause=cause, shard="s3://b/7.tar", tier="cold")
    assert words in alarm_of(waits)
    assert judge([report(0), waits], [], 1.0, 200.0).alarms == [alarm_of(waits)]
    assert judge([report(0), waits], [], 1.0, 300.0).alarms == []


def test_the_rich_give_way_to_the_poor_and_only_then():
    rich, poor = report(0, runway_s=60.0), report(1, runway_s=1.0)
    assert judge([rich, poor], [], 1.0, 100.0).keep_bytes == {"n0": 500}
    assert judge([rich, report(1, runway_s=50.0)], [], 1.0, 100.0).keep_bytes == {}
    assert judge([report(0, runway_s=2.0), poor], [], 1.0, 100.0).keep_bytes == {}
    # A node is as rich as its poorest rank.
    both = [rich, report(1, node="n0", runway_s=1.5), report(2, node="n2", runway_s=1.0)]
    assert judge(both, [], 1.0, 100.0).keep_bytes == {}
    assert judge([], [], 1.0, 1.0) == Lockstep()


def test_times_of_the_watch_are_checked():
    for wrong in ({"interval_s": 0.0}, {"line_s": -1.0}, {"alarm_s": -1.0}, {"gate_s": -1.0}):
        with pytest.raises(InvalidRequest, match="above 0"):
            Pacing(**wrong)


# The queue of ready batches


def test_more_batches_are_kept_ready_while_the_training_waits():
    queue = ReadyQueue[int](2, 100)
    queue.weighed(10)
    filled = threading.Event()

    def feed() -> None:
        for number in range(50):
            if number == 20:
                filled.set()
            assert queue.put(number)

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert [queue.take() for _ in range(50)] == list(range(50))
    feeder.join()
    # It waited at least once, for the first of all: now four, and never more than the memory allows.
    assert all(queue.put(number) for number in range(4))
    queue.weighed(60)
    late = threading.Thread(target=lambda: queue.put(4))
    late.start()
    assert [queue.take() for _ in range(5)] == [0, 1, 2, 3, 4]
    late.join()


def test_closing_wakes_both_sides():
    empty, full = ReadyQueue[int](1, 100), ReadyQueue[int](1, 100)
    assert full.put(1)
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda: results.append(empty.take())),
        threading.Thread(target=lambda: results.append(full.put(2))),
    ]
    for thread in threads:
        thread.start()
    empty.close()
    full.close()
    for thread in threads:
        thread.join(10)
    assert sorted(map(str, results)) == ["False", "None"]


def test_the_size_of_a_batch():
    assert size_of((torch.zeros(3, 4), [b"abc", "de"], {"x": torch.zeros(2, dtype=torch.uint8)}, 7)) == 55
