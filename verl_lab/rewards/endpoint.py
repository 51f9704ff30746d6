"""A reward part behind an HTTP endpoint: batched, retried, and no faster than asked.

A request is a POST of JSON `{"prompts": […], "responses": […], "rows": [{column: value}, …]}`; the
answer is `{"scores": […]}` or the list alone, a finite number a response, in their order. Where the
environment has `VERL_LAB_REWARD_TOKEN`, it is sent as a bearer token.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from verl_lab.errors import RewardError

BATCH_SIZE = 64
NUM_TOGETHER = 8
NUM_TRIES = 4
FIRST_WAIT_S = 0.5
MAX_PATIENCE_S = 120.0
"""Longest wait that a server may ask for: one that waits longer looks hung to the controller."""
LOOK_EVERY_S = 1.0
TOKEN = "VERL_LAB_REWARD_TOKEN"
SHOWN = 200
"""Characters of a refusal that an error shows."""


Moved = Callable[[int], None]


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
        self._jitter = random.Random()
        self._open = urllib.request.build_opener(_NoRedirects).open
        self._has_moved = threading.Event()

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        rows: Sequence[dict[str, Any]],
        on_move: Moved = lambda num_done: None,
    ) -> list[float | Unreachable]:
        """A score a response, in their order; what went wrong in place of those that failed.

        Args:
            prompts: [B].
            responses: [B].
            rows: [B], the dataset's columns.
            on_move: is told in this thread how many responses are done, whenever a request goes
                out or ends.

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
            asked = [pool.submit(ask, piece) for piece in pieces]
            try:
                left = set(asked)
                while left:
                    _, left = wait(left, LOOK_EVERY_S, FIRST_COMPLETED)
                    ended = [future.result() for future in asked if future not in left]
                    if self._has_moved.is_set():
                        self._has_moved.clear()
                        on_move(sum(map(len, ended)))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return [score for future in asked for score in future.result()]

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if TOKEN in os.environ:
            headers["Authorization"] = f"Bearer {os.environ[TOKEN]}"
        data = json.dumps(body, default=str).encode()
        reason = ""
        for attempt in range(NUM_TRIES):
            self._pace.wait()
            self._has_moved.set()
            request = urllib.request.Request(self.url, data, headers, method="POST")
            wait_s = FIRST_WAIT_S * 2**attempt * self._jitter.uniform(0.5, 1.5)
            try:
                with self._open(request, timeout=self._timeout_s) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    if error.code != 429 and error.code < 500:
                        raise self._refusal(error) from error
                reason, wait_s = f"answered {error.code}", _patience_s(error, wait_s)
            except (OSError, http.client.HTTPException) as error:  # unreachable, late, cut off
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            except ValueError as error:
                raise RewardError(f"reward {self.url}: answers with no JSON ({error})") from error
            finally:
                self._has_moved.set()
            if attempt + 1 < NUM_TRIES:
                self._sleep(wait_s)
        raise Unreachable(f"reward {self.url}: {reason}, {NUM_TRIES} times in a row")

    def _refusal(self, error: urllib.error.HTTPError) -> RewardError:
        if error.code < 400:
            place = error.headers.get("Location", "nowhere")
            return RewardError(
                f"reward {self.url}: redirects to {place} ({error.code}); name that address"
            )
        text = error.read().decode(errors="replace")[:SHOWN]
        return RewardError(f"reward {self.url}: refuses the request with {error.code}: {text}")

    def _checked(self, answer: Any, count: int) -> list[float]:
        scores = answer.get("scores") if isinstance(answer, dict) else answer
        if not isinstance(scores, list) or len(scores) != count:
            found = f"{len(scores)} scores" if isinstance(scores, list) else f"{answer!r:.{SHOWN}}"
            raise RewardError(
                f"reward {self.url}: answers {found} for {count} responses; answer "
                '{"scores": [...]} with one a response, in their order'
            )
        return scores


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for an answer: following it would drop the body, and hand on the token."""

    def redirect_request(self, *_: Any) -> None:
        """None: there is no other request."""
        return None


def _patience_s(error: urllib.error.HTTPError, wait_s: float) -> float:
    """The seconds of a Retry-After header; `wait_s` without one, or with a date."""
    try:
        asked_s = float(error.headers.get("Retry-After", ""))
    except ValueError:
        return wait_s
    is_wait = math.isfinite(asked_s) and asked_s >= 0
    return min(asked_s, MAX_PATIENCE_S) if is_wait else wait_s
