"""The pipelined loop with a recorder in place of the lab."""

import asyncio

import pytest

from verl_lab.controller.pipeline import pipelined


class Recorder:
    """Samples at once and trains slowly, or the other way round; counts how far it is ahead."""

    def __init__(self, max_staleness, sample_s=0.0, learn_s=0.001, stop_before=None):
        self.max_staleness, self.step, self.stop_before = max_staleness, 0, stop_before
        self.sample_s, self.learn_s = sample_s, learn_s
        self.trained, self.ahead, self.given_back, self.sampled = [], [], 0, 0

    async def may_go_on(self):
        return self.stop_before is None or self.step + 1 < self.stop_before

    async def before_step(self):
        pass

    async def sample(self, step):
        self.ahead.append(step - 1 - self.step)
        await asyncio.sleep(self.sample_s)
        self.sampled += 1
        return step, self.step  # made by the weights of so many steps

    async def learn(self, samples):
        await asyncio.sleep(self.learn_s)
        self.trained.append(samples)
        return samples

    async def finish_step(self, batch):
        self.step += 1

    def give_back(self):
        self.given_back += 1


def run(lab, until):
    asyncio.run(pipelined(lab, until=until))
    return lab


@pytest.mark.parametrize("max_staleness", [1, 2, 5])
@pytest.mark.parametrize("sample_s", [0.0, 0.003])
def test_every_step_trains_once_in_order_on_samples_that_are_not_too_old(max_staleness, sample_s):
    lab = run(Recorder(max_staleness, sample_s=sample_s), until=12)
    assert [step for step, _ in lab.trained] == list(range(1, 13))
    ages = [step - 1 - version for step, version in lab.trained]
    assert 0 <= min(ages) <= max(ages) <= max_staleness
    assert max(lab.ahead) <= max_staleness
    assert lab.given_back == 1


def test_sampling_runs_ahead_where_it_is_the_quicker_half():
    lab = run(Recorder(2), until=12)
    assert max(step - 1 - version for step, version in lab.trained) == 2


def test_a_stop_ends_at_a_boundary_and_gives_back_what_was_sampled_ahead():
    lab = run(Recorder(2, stop_before=4), until=100)
    assert lab.step == 3
    assert lab.sampled > 3
    assert lab.given_back == 1


@pytest.mark.parametrize("where", ["sample", "learn"])
def test_an_error_of_either_half_ends_both(where):
    lab = Recorder(1)

    async def fail(_):
        raise RuntimeError(f"in {where}")

    setattr(lab, where, fail)
    with pytest.raises(RuntimeError, match=f"in {where}"):
        run(lab, until=5)
    assert lab.step == 0
    assert lab.given_back == 1


def test_an_error_ahead_comes_after_the_steps_that_were_sampled_before_it():
    class Failing(Recorder):
        async def sample(self, step):
            if step == 3:
                raise RuntimeError("third")
            return await super().sample(step)

    lab = Failing(5)
    with pytest.raises(RuntimeError, match="third"):
        run(lab, until=9)
    assert lab.step == 2


def test_a_run_that_has_its_steps_samples_nothing():
    lab = Recorder(1)
    lab.step = 5
    assert run(lab, until=5).sampled == 0
