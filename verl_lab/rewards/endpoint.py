"""A reward part behind an HTTP endpoint: batched, retried, and no faster than asked.

A request is a POST of JSON `{"prompts": […], "responses": […], "rows": [{column: value}, …]}`; the
answer is `{"scores": […]}` or the list alone, a finite number a response, in their order. Where the
environment has `VERL_LAB_REWARD_TOKEN`, it is sent as a bearer token.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from verl_lab.errors import RewardError

BATCH_SIZE = 64
NUM_TOGETHER = 8
NUM_TRIES = 4
FIRST_WAIT_S = 0.5
TOKEN = "VERL_LAB_REWARD_TOKEN"
SHOWN = 200
"""Characters of a refusal that an error shows."""


class Unreachable(Exception):
    """The endpoint did not answer, or asked for patience, as often as it was tried."""


def is_endpoint(part: str) -> bool:
    """Whether the name of a reward part is an address."""
    return part.startswith(("http://", "https://"))


@dataclass
class Pace:
    """Lets requests through at most so many a second; shared by the threads that send them."""

    per_s: float | None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _free_at: float = field(default=float("-inf"))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> None:
        """Waits for this request's turn."""
        if self.per_s is None:
            return
        with self._lock:
            now = self.clock()
            turn = max(now, self._free_at)
            self._free_at = turn + 1 / self.per_s
        if turn > now:
            self.sleep(turn - now)


class Endpoint:
    """Scores responses by asking an address.

    Args:
        url: where to ask.
        timeout_s: longest time for one request.
        pace: when a request may go out.
        sleep: waits between tries.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        pace: Pace | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self._timeout_s, self._sleep = url, timeout_s, sleep
        self._pace = pace or Pace(None)
        self._jitter = random.Random(url)

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[dict[str, Any]]
    ) -> list[float | Unreachable]:
        """A score a response, in their order; what went wrong in place of those that failed.

        Raises:
            RewardError: the endpoint refuses a request, or answers with something else than a
                number a response.
        """
        starts = range(0, len(responses), BATCH_SIZE)
        pieces = [slice(start, start + BATCH_SIZE) for start in starts]

        def ask(piece: slice) -> list[float | Unreachable]:
            body: dict[str, list[Any]] = {
                "prompts": list(prompts[piece]),
                "responses": list(responses[piece]),
                "rows": list(rows[piece]),
            }
            try:
                return list(self._checked(self._post(body), len(body["responses"])))
            except Unreachable as error:
                return [error] * len(body["responses"])

        with ThreadPoolExecutor(NUM_TOGETHER) as pool:
            return [score for found in pool.map(ask, pieces) for score in found]

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if TOKEN in os.environ:
            headers["Authorization"] = f"Bearer {os.environ[TOKEN]}"
        data = json.dumps(body, default=str).encode()
        reason = ""
        for attempt in range(NUM_TRIES):
            self._pace.wait()
            request = urllib.request.Request(self.url, data, headers, method="POST")
            wait_s = FIRST_WAIT_S * 2**attempt * self._jitter.uniform(0.5, 1.5)
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                if error.code != 429 and error.code < 500:
                    text = error.read().decode(errors="replace")[:SHOWN]
                    raise RewardError(
                        f"reward {self.url}: refuses the request with {error.code}: {text}"
                    ) from error
                reason = f"answered {error.code}"
                wait_s = _asked_patience(error) or wait_s
            except json.JSONDecodeError as error:
                raise RewardError(f"reward {self.url}: answers with no JSON ({error})") from error
            except OSError as error:  # refused, unreachable, timed out
                reason = str(getattr(error, "reason", error))
            if attempt + 1 < NUM_TRIES:
                self._sleep(wait_s)
        raise Unreachable(f"reward {self.url}: {reason}, {NUM_TRIES} times in a row")

    def _checked(self, answer: Any, count: int) -> list[float]:
        scores = answer.get("scores") if isinstance(answer, dict) else answer
        if not isinstance(scores, list) or len(scores) != count:
            found = f"{len(scores)} scores" if isinstance(scores, list) else f"{answer!r:.{SHOWN}}"
            raise RewardError(
                f"reward {self.url}: answers {found} for {count} responses; answer "
                '{"scores": [...]} with one a response, in their order'
            )
        return scores


def _asked_patience(error: urllib.error.HTTPError) -> float | None:
    """The seconds of a Retry-After header; None without one, or with a date."""
    try:
        return float(error.headers.get("Retry-After", ""))
    except ValueError:
        return None
