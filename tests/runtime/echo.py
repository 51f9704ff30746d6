"""A service for the tests of the runtime: does what it is told, and nothing of the lab."""

import os
import time


class Echo:
    def __init__(self, greeting, report):
        if greeting == "refuse":
            raise ValueError("will not start")
        self.greeting, self.report = greeting, report

    def say(self, what):
        return {"said": what, "greeting": self.greeting, "pid": os.getpid()}

    def cores(self):
        import torch

        return {"cores": sorted(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}

    def sleep(self, seconds, reports=0):
        for i in range(reports):
            time.sleep(seconds / reports)
            self.report({"row": i})
        if not reports:
            time.sleep(seconds)
        return "slept"

    def report_and_sleep(self, seconds, key):
        self.report({key: True})
        time.sleep(seconds)
        return "slept"

    def fail(self):
        return {}["missing"]

    def fail_as_ours(self):
        from verl_lab.errors import RewardError

        raise RewardError("reward/x: sample 3 has no score; return a number")

    def die(self, code):
        print("last words", flush=True)
        os._exit(code)
