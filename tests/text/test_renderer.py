"""Rendering in other processes: any template ends soon, nothing of one is left, and honest ones are not disturbed."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from forerun.errors import ChatTemplateError, ForerunError
from forerun.text import renderer
from forerun.text.chat import ChatTemplate
from forerun.text.renderer import MOST_IDLE, RENDERER, Worker

SRC = Path(renderer.__file__).resolve().parents[2]
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes\ud800 \u2028é"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HONEST = "<user>Hi<assistant>yes\ud800 \u2028é"
TOO_MUCH = "the chat template of a test takes more time or memory than a conversation needs"


def rendered(source: str, messages: object = TALK, **options: Any) -> str:
    return ChatTemplate(source, "a test").render(messages, **options)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short limit, long enough for what is honest here; and as if there were no other by the clock."""
    monkeypatch.setattr(renderer, "LIMIT_S", 0.1)
    monkeypatch.setattr(renderer, "PATIENCE", 1000.0)


def grown(step: str, start: str = "'x'", times: int = 99) -> str:
    """A value n.v that is made of itself again and again."""
    begin = "{% set n = namespace(v=" + start + ") %}"
    return f"{begin}{{% for i in range({times}) %}}{{% set n.v = {step} %}}{{% endfor %}}"


SHARED = "{% set n = namespace(v=[1], w=[1], t=(1,)) %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}"
SHARED += "{% set n.w = [n.w, n.w] %}{% set n.t = (n.t, n.t) %}{% endfor %}"
WALKS = {  # what reads values in C, so that no instruction of Python is between its beginning and its end
    "==": "{{ n.v == n.w }}",
    "sort": "{{ [n.v, n.w] | sort }}",
    "groupby": "{{ [{'a': n.v}, {'a': n.w}] | groupby('a') }}",
    "hashes": "{{ {n.t: 1} }}",
    "text": "{{ n.v }}",
    "format": "{{ '%s' % (n.v,) }}",
    "tojson": "{{ n.v | tojson }}",
    "int": "{{ ('f' * 9999999) | int(base=16) }}{{ 7 ** 99999999 }}",
    "urlize": "{{ ('www.' * 999999) | urlize }}",
}
MUCH = "{% set x = 'ab' * 999999 %}{% for i in range(99999) %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDS = "{% endfor %}" * 3
HOSTILE = {
    "division": "{{ 1 / 0 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "repeated text": "{{ 'x' * 10**10 }}",
    "power": "{{ 9**(9**9) }}",
    "loops": LOOPS + "x" + ENDS,
    "doubled": grown("n.v + n.v"),
    "replaced": "{% set x = 'a' * 99999 %}{{ x.replace('a', x) | length }}",
    "indented": "{{ ('a\n' * 99999) | indent(99999) | length }}",
    "wide format": "{{ '%9999999999d' % 1 }}",
    "searches": MUCH + "{% if 'ba' * 99 + 'c' in x %}{% endif %}{% endfor %}",
    "compiled products": "{{ " + "*".join(["'x'", *["999"] * 9]) + " }}",
    "deep": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "many names": "".join(f"{{% set a{i} = a{i - 1} %}}{{% for b in [] %}}{{% endfor %}}" for i in range(9999)),
    "long": "x" * (1 << 21),
    "files": "{% include '/etc/passwd' %}",
    "escapes": "{{ ().__class__.__base__.__subclasses__() }}",
    "escapes of dict": "{{ dict.mro() }}",
    "hidden names": "{% set n = namespace(_x=1) %}",
    "attributes": "{{ messages.append.__self__.clear() }}",
    "missing key": "{{ messages[9].content.text }}",
    "not a template": "{% for %}",
}


@pytest.mark.short("sort", "tojson", "urlize", "format")
@pytest.mark.parametrize("name", WALKS)
@pytest.mark.usefixtures("hasty")
def test_what_walks_values_in_c_ends_at_the_limit(name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ChatTemplateError, match=TOO_MUCH):
        rendered(SHARED + WALKS[name])
    assert time.monotonic() - begin < 20, "a fifth of a second is usual"


@pytest.mark.short("division", "recursion", "repeated text", "loops", "doubled", "long", "power")
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("hasty")
def test_a_hostile_template_ends_soon_and_by_name(name: str) -> None:
    begin, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ChatTemplateError, match=r"template of a test (fails|does not parse|has \d+ char|takes)"
    ) as caught:
        rendered(HOSTILE[name])
    assert len(str(caught.value)) < 400
    assert time.monotonic() - begin < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 100 << 10
    assert rendered(PLAIN) == HONEST


def test_memory_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "LIMIT_S", 60.0)
    for source in ("{{ 'x' * 2**31 }}", grown("n.v + n.v")):
        with pytest.raises(ChatTemplateError, match=TOO_MUCH):
            rendered(source)


def test_the_clock_ends_what_the_system_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "LIMIT_S", 60.0)
    monkeypatch.setattr(renderer, "PATIENCE", 0.3 / 60.0)
    with pytest.raises(ChatTemplateError, match=TOO_MUCH):
        rendered(SHARED + WALKS["=="])


def test_a_text_that_is_too_long_is_named_before_all_of_it_is_written() -> None:
    with pytest.raises(ChatTemplateError, match="fails: it writes more than 16777216 characters"):
        rendered("{% set x = 'x' * 2**22 %}{{ x }}{{ x }}{{ x }}{{ x }}{{ 'x' }}")
    assert len(rendered("{% set x = 'x' * 2**22 %}{{ x }}{{ x }}{{ x }}{{ x }}")) == 1 << 24


@pytest.mark.usefixtures("hasty")
def test_others_render_while_a_template_hangs() -> None:
    stop, texts, source = threading.Event(), [], PLAIN + "{# another #}"

    def render() -> None:
        while not stop.is_set():
            texts.append(rendered(source))

    thread = threading.Thread(target=render)
    thread.start()
    for name in ("==", "text", "hashes"):
        with pytest.raises(ChatTemplateError, match=TOO_MUCH):
            rendered(SHARED + WALKS[name])
    stop.set()
    thread.join()
    assert len(texts) > 3
    assert set(texts) == {HONEST}


def test_one_process_serves_one_thread_and_two_wait_at_most() -> None:
    slow = PLAIN + "{% for a in range(300) %}{% for b in range(300) %}{% endfor %}{% endfor %}"
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda number: rendered(f"{slow}{number}")[:-1], range(8))) == {HONEST}
    assert 1 <= RENDERER.idle.qsize() <= MOST_IDLE


def idle_worker() -> Worker:
    """The process that renders next; there is one after a rendering."""
    rendered(PLAIN)
    return RENDERER.idle.queue[-1]


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it reads /proc")


def left() -> tuple[int, int, int]:
    """Files, threads and children of this process, zombies among them."""
    children = Path("/proc/self/task").glob("*/children")
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        sum(len(path.read_text().split()) for path in children),
    )


@needs_proc
@pytest.mark.usefixtures("hasty")
def test_nothing_is_left_of_a_process_that_was_ended() -> None:
    RENDERER.close()
    before = left()
    for source in (SHARED + WALKS["=="], "{{ 'x' * 2**31 }}", "{{ 1 / 0 }}", "{% if %}"):
        with pytest.raises(ChatTemplateError):
            rendered(source)
        RENDERER.close()
        assert left() == before


@needs_proc
def test_an_interrupt_leaves_nothing_and_no_answer_for_others() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    RENDERER.close()
    before, old = left(), signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            rendered(SHARED + WALKS["=="])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert left() == before
    assert rendered(PLAIN) == HONEST


@needs_proc
def test_a_process_has_pipes_and_what_it_needs_alone() -> None:
    with open(os.devnull) as other:
        os.set_inheritable(other.fileno(), True)
        RENDERER.close()
        process = Path("/proc") / str(idle_worker().process.pid)
        assert sorted(os.listdir(process / "fd")) == ["0", "1", "2"]
    assert "torch" not in (process / "maps").read_text()


def test_signals_to_the_parent_are_not_for_it_and_a_process_that_died_while_it_waited_is_replaced() -> None:
    process = idle_worker().process
    assert os.getpgid(process.pid) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    assert idle_worker().process is process
    for worker in list(RENDERER.idle.queue):
        os.kill(worker.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
    assert rendered(PLAIN) == HONEST
    assert idle_worker().process is not process


def test_without_a_process_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    RENDERER.close()
    monkeypatch.setattr(renderer, "command", lambda: ["/no/such/program"])
    with pytest.raises(ChatTemplateError, match=r"does not start .*No such file"):
        rendered(PLAIN)


def program(code: str) -> subprocess.Popen[str]:
    """A program that has rendered something, with its own processes."""
    begin = "from forerun.text.renderer import RENDERER\nassert RENDERER.answer('x', {}) == ('text', 'x')\n"
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", begin + code], stdin=pipe, stdout=pipe, text=True, env=environment)


def alive(pid: int) -> bool:
    """Whether a process that may be somebody else's child runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_proc
@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_processes_end_with_the_one_that_started_them(how: str) -> None:
    with program("print(RENDERER.idle.queue[0].process.pid, flush=True)\ninput()") as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill() if how == "it is killed" else parent.communicate("\n")
    end_s = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < end_s, "it goes on alone"
        time.sleep(0.01)


FORK = """
import os
child = os.fork()
mine = RENDERER.answer("{{ n }}", {"n": child})
if not child:
    os._exit(mine != ("text", "0"))
assert mine == ("text", str(child)) and os.waitpid(child, 0)[1] == 0
assert RENDERER.answer("{{ n }}", {"n": 2}) == ("text", "2")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_has_processes_of_its_own() -> None:
    with program(FORK) as parent:
        assert parent.wait(60) == 0


def words(text: str) -> st.SearchStrategy[str]:
    """One of the words of a text."""
    return st.sampled_from(text.split())


ATOMS = words(
    """1 -2 0 2.5 'a' '\tb' '<&é' [] {} [1,'a',[2]] {'b':1,'a':[]} (1,) none true n.v n.w messages messages[0].content x
    x.y messages[-1] loop.index namespace(a=1).a dict(a=1)"""
)
LARGE = words("n.v n.w n.t {n.t:1} ('ab'*99999) (7**9999) range(99999) 99999 f(9) ([1]*9999)")
OPERATORS = words("+ - * / // % ** ~ == != < <= > >= and or in not_in").map(lambda word: word.replace("_", " "))
FILTERS = words(
    """abs attr('a') batch(2)|list capitalize center(9) count d default(1) dictsort escape filesizeformat first float
    forceescape format(1) groupby('a') indent(2) int items|list join(',') last length list lower map('upper')|list max
    min pprint reject|list replace('a','bb') reverse|list round safe select|list selectattr('a')|list slice(2)|list sort
    string striptags sum title tojson tojson(indent=2) tojson(sort_keys=true) trim truncate(2) unique|list upper
    urlencode urlize wordcount wordwrap(3) xmlattr"""
)
TESTS = words("defined string mapping sequence none number boolean callable even iterable undefined")
AFTER = words("upper() split() items() a strip('a') b")


def expressions(atoms: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions of Jinja."""
    return st.recursive(
        atoms,
        lambda inner: (
            st.builds("({} {} {})".format, inner, OPERATORS, inner)
            | st.builds("({} | {})".format, inner, FILTERS)
            | st.builds("({} is {})".format, inner, TESTS)
            | st.builds("{}[{}]".format, inner, inner)
            | st.builds("{}[:{}]".format, inner, inner)
            | st.builds("[{}, {}]".format, inner, inner)
            | st.builds("({} if {} else {})".format, inner, inner, inner)
            | st.builds("{}.{}".format, inner, AFTER)
        ),
        max_leaves=6,
    )


def statements(atoms: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Bodies of templates, with lines and blanks that the rules of whitespace are about."""
    value = expressions(atoms)
    return st.recursive(
        st.builds("{{{{ {} }}}}".format, value)
        | st.builds("{{%- set n.v = {} %}}\n".format, value)
        | st.builds("  {{% set x = {} %}} \n".format, value)
        | st.sampled_from(["text\n", " \n", "{# #}\n"]),
        lambda inner: (
            st.builds("{}{}".format, inner, inner)
            | st.builds("{{% if {} %}}\n{}{{% else %}}{}{{%- endif %}}".format, value, inner, inner)
            | st.builds("{{% for x in {} %}}{} {{% endfor %}}\n".format, value, inner)
            | st.builds("{{% for x in messages %}}{}{{% break %}}{{% endfor %}}".format, inner)
            | st.builds("{{% generation %}}{}{{% endgeneration %}}\n".format, inner)
            | st.builds("{{% set x %}}{}{{% endset %}}".format, inner)
            | st.builds("{{% macro f(x) %}}{}{{% endmacro %}}{{{{ f(1) }}}}".format, inner)
            | st.builds("{{% filter upper %}}{}{{% endfilter %}}".format, inner)
        ),
        max_leaves=6,
    )


def outcome(render: Callable[[], str]) -> str | None:
    """The text; None for any error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's compiler warns of 1[2]
        try:
            return render()
        except Exception:
            return None


def of_random(count: int, atoms: st.SearchStrategy[str], check: Callable[[str], None]) -> None:
    """Check so many random bodies."""
    limits = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    limits(given(statements(atoms))(check))()


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.full)])
def test_random_templates_give_what_transformers_gives(count: int) -> None:
    def check(body: str) -> None:
        source = "{% set n = namespace(v=1, w=[1]) %}" + body
        tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
        ours = outcome(lambda: rendered(source, TALK, tools=tools, x=0))
        theirs = outcome(lambda: render_jinja_template([TALK], tools, chat_template=source, x=0)[0][0])
        assert ours == theirs

    of_random(count, ATOMS, check)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.full)])
def test_random_templates_end_in_time(count: int) -> None:
    def check(body: str) -> None:
        begin = time.monotonic()
        with suppress(ForerunError):
            rendered("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else 'x' * 999 }}{% endmacro %}" + SHARED + body)
        assert time.monotonic() - begin < 20
        assert rendered(PLAIN) == HONEST

    of_random(count, ATOMS | LARGE, check)
