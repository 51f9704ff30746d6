def test_the_plan_shows_sizes_and_who_runs_where(verl_lab, folder):
    code, out, _ = verl_lab("check", "--config", "small.yaml", "rollout.group_size=8")
    assert code == 0
    text = "\n".join(out)
    assert "16 samples = 2 prompts x 8 responses" in text
    for worker in ("rollout-0", "trainer-0", "reward-0"):
        assert worker in text
    assert "16 sequences in flight" in text


def test_nothing_is_started_and_nothing_is_written(verl_lab, folder):
    before = sorted(folder.iterdir())
    assert verl_lab("check", "--config", "small.yaml")[0] == 0
    assert sorted(folder.iterdir()) == before
    assert verl_lab("ps")[1] == ["No session is live."]


def test_all_that_keeps_a_config_from_starting_is_said_at_once(verl_lab):
    code, out, err = verl_lab(
        "check", "--config", "small.yaml", "rollout.device_map=cuda:77", "reward.parts={a.py:f: 1}"
    )
    assert code == 2
    assert out == []
    assert "rollout.device_map: cuda:77 does not exist here; there is cpu" in err
    assert "the file a.py does not exist" in err
