import pandas as pd
import pytest

from verl_lab.store.timeline import utilisation

SPANS = pd.DataFrame(
    [
        ("rollout-0", "cpu:0", "generate", 1, 0.0, 4.0),
        ("rollout-0", "cpu:0", "load_weights", 1, 3.0, 5.0),  # overlaps by one second
        ("trainer-0", "cpu:1", "update", 1, 5.0, 10.0),
        ("trainer-0", "cpu:1", "update", 2, 10.0, 90.0),
    ],
    columns=["worker", "device", "kind", "step", "start", "end"],
)


def test_a_worker_is_busy_for_the_union_of_its_spans():
    found = utilisation(SPANS, last=1)
    assert found.loc["rollout-0", ["busy_s", "share"]].tolist() == [5.0, 0.5]
    assert found.loc["trainer-0", ["device", "share"]].tolist() == ["cpu:1", 0.5]
    assert found.loc["rollout-0", "load_weights_s"] == 2.0


def test_only_the_steps_that_were_asked_for_count():
    assert utilisation(SPANS, first=2).index.tolist() == ["trainer-0"]
    assert utilisation(SPANS, first=2).loc["trainer-0", "busy_s"] == pytest.approx(80)


def test_no_span_is_nobody():
    assert len(utilisation(SPANS.iloc[:0])) == 0
