from verl_lab.cli.sessions import session_row

SESSION = {
    "id": "1a2b3c4d",
    "pid": 4242,
    "run_folder": "/elsewhere/runs/tiny",
    "devices": ["cpu:0", "cpu:1"],
    "state": "idle",
    "step": 3,
    "steps_total": 60,
    "workers": [{"rss_bytes": 100 << 20}, {"rss_bytes": 28 << 20}],
    "num_clients": 0,
    "keep_alive_s": 600.0,
    "lease_ends_in_s": 83.2,
}


def test_a_session_shows_what_it_holds_and_when_it_ends():
    assert session_row(SESSION) == [
        "/elsewhere/runs/tiny", "1a2b3c4d", "idle", "3/60", "cpu:0,cpu:1", "4242", "128 MiB", "0",
        "in 1:23",
    ]  # fmt: skip


def test_a_session_with_clients_ends_after_the_last_of_them():
    session = {**SESSION, "num_clients": 2, "lease_ends_in_s": None}
    assert session_row(session)[-1] == "600 s after its last client"


def test_a_run_without_clients_ends_after_its_last_step():
    session = {**SESSION, "state": "training", "keep_alive_s": 5.0, "lease_ends_in_s": None}
    assert session_row(session)[-1] == "5 s after its run"


def test_a_session_that_does_not_answer_shows_what_it_announced():
    announced = {key: SESSION[key] for key in ("id", "pid", "run_folder", "devices")}
    assert session_row({**announced, "state": "gone"})[2:] == [
        "gone", "?", "cpu:0,cpu:1", "4242", "?", "?", "?",
    ]  # fmt: skip
