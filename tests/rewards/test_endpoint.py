"""Against a real HTTP server on a port that the system chooses."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl_lab.errors import RewardError
from verl_lab.rewards.endpoint import BATCH_SIZE, Endpoint, Pace, Unreachable, is_endpoint


def lengths(body):
    return 200, {"scores": [float(len(text)) for text in body["responses"]]}


@pytest.fixture
def server():
    """Starts a server that answers by a function of the body: (status, answer, headers)."""
    servers = []

    def start(answer):
        requests = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                requests.append((body, dict(self.headers)))
                status, found, *more = answer(body)
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(made)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{made.server_address[1]}/score", requests

    yield start
    for made in servers:
        made.shutdown()
        made.server_close()


def ask(url, responses, waits=None, **more):
    sleep = (lambda s: None) if waits is None else waits.append
    endpoint = Endpoint(url, timeout_s=5.0, sleep=sleep, **more)
    return endpoint.score(
        ["p"] * len(responses), responses, [{"n": i} for i in range(len(responses))]
    )


def test_scores_come_back_in_order_from_several_requests(server):
    url, requests = server(lengths)
    responses = ["x" * (i % 7) for i in range(2 * BATCH_SIZE + 3)]
    assert ask(url, responses) == [float(len(text)) for text in responses]
    assert sorted(len(body["responses"]) for body, _ in requests) == [3, BATCH_SIZE, BATCH_SIZE]
    assert all(len(body["prompts"]) == len(body["rows"]) for body, _ in requests)


def test_a_bare_list_of_scores_will_do(server):
    url, _ = server(lambda body: (200, [1, 2]))
    assert ask(url, ["a", "b"]) == [1, 2]


def test_a_busy_server_is_asked_again_when_it_says(server):
    answers = iter([(503, {}, {"Retry-After": "7"}), (429, {}), (200, [5.0])])
    url, requests = server(lambda body: next(answers))
    waits = []
    assert ask(url, ["a"], waits) == [5.0]
    assert len(requests) == 3
    assert waits[0] == 7
    assert 0.5 <= waits[1] <= 1.5  # twice the first wait, by chance half or half again


@pytest.mark.parametrize(
    ("asked", "least_s", "most_s"),
    [("0", 0, 0), ("1e9", 120, 120), ("-1", 0.25, 0.75), ("nan", 0.25, 0.75),
     ("Tue, 01 Dec 2026 10:00:00 GMT", 0.25, 0.75)],
)  # fmt: skip
def test_no_server_can_ask_for_a_wait_that_makes_no_sense(server, asked, least_s, most_s):
    answers = iter([(503, {}, {"Retry-After": asked}), (200, [5.0])])
    url, _ = server(lambda body: next(answers))
    waits = []
    assert ask(url, ["a"], waits) == [5.0]
    assert least_s <= waits[0] <= most_s


def test_an_answer_that_breaks_off_is_asked_for_again(server):
    answers = iter([(200, [5.0], {"Content-Length": "100", "Connection": "close"}), (200, [5.0])])
    url, requests = server(lambda body: next(answers))
    assert ask(url, ["a"]) == [5.0]
    assert len(requests) == 2


def test_a_redirect_is_refused_and_the_token_stays_here(server, monkeypatch):
    monkeypatch.setenv("VERL_LAB_REWARD_TOKEN", "secret")
    there, seen = server(lengths)
    url, _ = server(lambda body: (302, {}, {"Location": there}))
    with pytest.raises(RewardError, match=f"redirects to {there} .302.; name that address"):
        ask(url, ["a"])
    assert seen == []


def test_every_request_that_goes_out_or_ends_is_a_sign_of_life(server):
    url, _ = server(lengths)
    endpoint, moves = Endpoint(url, timeout_s=5.0), []
    responses = ["a"] * (BATCH_SIZE + 1)
    endpoint.score(responses, responses, [{}] * len(responses), on_move=moves.append)
    assert moves == sorted(moves)
    assert moves[-1] == BATCH_SIZE + 1


def test_one_that_stays_away_costs_the_samples_their_score_and_says_why():
    (found,) = ask("http://127.0.0.1:9/none", ["a"])
    assert isinstance(found, Unreachable)
    assert "4 times in a row" in str(found)


def test_a_refusal_is_an_error_at_once_with_what_the_server_said(server):
    url, requests = server(lambda body: (400, b"no such field: rows"))
    with pytest.raises(RewardError, match="with 400: no such field: rows"):
        ask(url, ["a"])
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [([1.0], "answers 1 scores for 2 responses"), ({"score": 1}, "answers {'score': 1} for 2"),
     (b"<html>", "answers with no JSON")],
)  # fmt: skip
def test_another_answer_than_a_score_each_is_refused(server, answer, said):
    url, _ = server(lambda body: (200, answer))
    with pytest.raises(RewardError, match=said):
        ask(url, ["a", "b"])


def test_the_token_of_the_environment_goes_along(server, monkeypatch):
    monkeypatch.setenv("VERL_LAB_REWARD_TOKEN", "secret")
    url, requests = server(lengths)
    ask(url, ["a"])
    assert requests[0][1]["Authorization"] == "Bearer secret"


def test_requests_keep_the_distance_that_was_asked_for():
    now, waits = [10.0], []
    pace = Pace(4.0, clock=lambda: now[0], sleep=waits.append)
    for _ in range(3):
        pace.wait()
    assert waits == [0.25, 0.5]
    now[0] += 60
    pace.wait()
    assert waits == [0.25, 0.5]


def test_only_addresses_are_endpoints():
    assert is_endpoint("https://host/score")
    assert not is_endpoint("file.py:score")
