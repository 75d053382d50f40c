"""Chat templates render as in Transformers; templates that fail, escape or never end are refused."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.spread import spread

from weft.errors import TokenizerError
from weft.text import template as templates
from weft.text.config import Byte
from weft.text.tokenizer import Tokenizer, build_tokenizer

TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  Grüße, 東京?\n"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "100% {sure}"},
]

CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# as in LLaMA 3.1 and Mistral: undefined variables, a date, slices, namespaces, counted turns
WITH_TOOLS = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{% set system = "" %}{% endif %}
{%- if tools is not none %}{{ raise_exception('no tools here') }}{% endif %}
{%- if documents %}{{ documents | tojson }}{% endif %}
{{- "system " ~ date_string ~ "\n" ~ system }}
{%- set ns = namespace(turns=0, all="") %}
{%- for message in messages %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- set ns.all = ns.all + message.content[:3] %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn') }}{% endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] %s [/INST]' % message.content }}
    {%- else %}
        {{- ' ' ~ message.content.replace('l', 'LL') ~ eos_token }}
    {%- endif %}
{%- endfor %}
{{- ns.turns * 2 ** 3 }}|{{ ns.all }}|{{ '-' * 3 }}|{{ ', '.join(messages | map(attribute='role') | list) }}"""

# the tag that marks replies in templates for training
MARKED = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
{% generation %}{% set inner = 'A' %}{{ inner }}: {{ message['content'] + eos_token }}{% endgeneration %}
{% else %}
{{ message['role'][0] | upper }}: {{ message['content'] }}
{% endif %}
{% endfor %}{{ inner is defined }}"""

JSON = """{% macro shown(value) %}{% for key, each in value | dictsort %}{{ key }}={{ each | tojson }};{% endfor %}
{% endmacro -%}
{{ messages | tojson }}
{{ messages | tojson(indent=2) }}
{{ messages[0] | tojson(separators=(',', ':'), sort_keys=True) }}{{ messages[1] | tojson(ensure_ascii=True) }}
{% for message in messages if message.role != 'system' %}
{{- shown(message) | indent(4, true) }}{{ loop.last }}{{ message.content | replace('e', '<e>') | length }}
{% if loop.index == 2 %}{% break %}{% endif %}
{% endfor %}
{{ 'in 2024, {:>5}|{name}'.format(7, name='x') }}{{ '100%% 2024 %5.2f' % 7.0 }}
{{ messages | map(attribute='content') | join('; ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 7.256 | round(2) }}
{{ '%s-%05d' | format('a', 3) }}{{ '**%s** in 123456 (%d*)' % ('a', 3) }}{{ '{{"a": "{}"}} * 123456'.format('x') }}
{%- for i in range(3) %}{{ i }}{{ cycler('a', 'b').next() }}{% endfor %}"""


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return build_tokenizer(Byte(), [])


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer.from_json(tokenizer.to_json(), tokenizer.roles, template)


@pytest.mark.parametrize("reply", [True, False])
@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS, MARKED, JSON])
def test_templates_render_as_in_transformers(plain: Tokenizer, template: str, reply: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    chatty = with_template(plain, template)
    chatty.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rendered = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=reply)
    assert len(rendered) > 50
    assert chatty.chat(TALK, reply=reply) == rendered


def test_the_date_is_today(plain: Tokenizer) -> None:
    assert with_template(plain, "{{ strftime_now('%Y') }}").chat([]) == str(datetime.now().year)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


NESTED = """{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}
{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"""


FAILING = [
    "{{ 1 / 0 }}",
    "{{ '{}'.format() }}",
    "{{ '{.x.y}'.format(1) }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{{ 'a'.encode('x') }}",
    "{{ messages[0].nothing.at_all }}",
    "{{ ''.join(3) }}",
    "{{ raise_exception('two\nlines') }}",
    "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "{% generation %}open",
    "{{ range(10**6) | list }}",
    "{{ messages | tojson(odd=1) }}",
    ENDLESS.replace("BODY", "x"),
    ENDLESS.replace("BODY", "{% set y = 1 %}"),
    "{% set all %}" + ENDLESS.replace("BODY", "a text") + "{% endset %}",
    "{% for i in range(999) %}{{ 'a' * 10**5 }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{{ 'a' * 10**11 }}",
    "{{ 10**11 * 'a' }}",
    "{{ ([1] * 10**9) | length }}",
    "{{ (2 ** (10**9)) | string | length }}",
    "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] | join %}{% endfor %}",
    "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}"
    "{% set ns.a = b %}{% endfor %}",
    "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a.replace('a', ns.a) %}{% endfor %}",
    "{{ 'a'.ljust(10**10) | length }}",
    "{{ 'a' | center(10**10) | length }}",
    "{{ 'a' | indent(10**10) | length }}",
    "{{ '{:>10000000000}'.format(1) | length }}",
    "{{ '{:>{}}'.format(1, 10**10) | length }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%(a)010000000000d' % {'a': 1} }}",
    "{{ '%.10000000000f' % 1 }}",
    "{{ '{0:{1}}'.format(1, 10**10) | length }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**6) | length }}",
    "{{ ('a' * 10**6).join('b' * 10**6) | length }}",
    "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = [ns, ns] | map(attribute='a') | join %}"
    "{% endfor %}",
    "{{ (['a' * 10**7] * 10**4) | tojson | length }}",
    "{{ (['a' * 10**7] * 10**4) | string | length }}",
    "{{ ['a' * 10**7] * 10**4 ~ '' }}",
    "{{ '%s' % (['a' * 10**7] * 10**4) }}",
    NESTED + "{{ ns.a == ns.b }}",
    NESTED + "{{ ns.a in [ns.b] }}",
    NESTED + "{{ [ns.a, ns.b] | sort }}",
    NESTED + "{{ [ns.b].count(ns.a) }}",
    NESTED + "{{ ns.a }}",
    NESTED + "{{ ns.a | tojson }}",
    NESTED + "{{ '{}'.format(ns.a) }}",
    NESTED + "{{ [ns.a, ns.b] | unique | list }}",
    NESTED + "{{ [[ns.a], [ns.b]] | groupby(0) | list }}",
    NESTED + "{{ ns.a is eq ns.b }}",
    NESTED.replace("[", "(").replace("]", ",)") + "{{ {ns.a: 1} }}",
    NESTED.replace("[ns.a, ns.a]", "dict(x=ns.a, y=ns.a)").replace("[ns.b, ns.b]", "dict(x=ns.b, y=ns.b)")
    + "{{ ns.a == ns.b }}",
]


@pytest.mark.parametrize("template", spread(FAILING, 20))
@pytest.mark.timeout(60)
def test_failing_and_endless_templates(plain: Tokenizer, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused in one line."""
    monkeypatch.setattr(templates, "MAX_MILLISECONDS", 50)
    with pytest.raises(TokenizerError, match=r"^the chat template cannot be rendered: .") as raised:
        with_template(plain, template).chat(TALK)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


WIDE = "('ba' * (8000000 + i))"


WORK = [
    *(f"{WIDE} | {name} | list" for name in ("unique", "sort", "groupby(0)", "batch(1)", "slice(9)")),
    *(f"{WIDE} | {name}" for name in ("map('upper') | list", "list", "wordwrap(1)", "pprint", "urlize")),
    *(f"{WIDE} | {name}" for name in ("reverse | join('-')", "random")),
    *(f"{WIDE}.{name}" for name in ("split('a')", "replace('b', 'c' * 99999)", "zfill(10**9)", "splitlines()")),
    *(f"('a\n' * 8000000) | {name}" for name in ("indent(99)", "title", "trim | wordcount", "escape")),
    *("(10**10)**(10**8)", "lipsum(n=10**6)", "'x' | center(10**9)", "[cycler(*range(99999))] * 10**8"),
    *(f"{WIDE} is {name}" for name in ("in ('ab' * 8000000)", "upper", "eq('ba' * 8000000)")),
]


@pytest.mark.parametrize("work", spread(WORK, 8))
@pytest.mark.timeout(60)
def test_no_operation_escapes_the_limits(plain: Tokenizer, work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_MILLISECONDS", 50)
    monkeypatch.setattr(templates, "MAX_MEMORY_BYTES", 1 << 28)
    chatty = with_template(plain, "{% for i in range(99999) %}\n{% set x = " + work + " %}{% endfor %}")
    with pytest.raises(TokenizerError, match=r"it takes more than (0\.05 seconds|256 MiB of memory)$"):
        chatty.chat(TALK)


@pytest.mark.parametrize("piece", ["{{ m }}", "{% if m %}{% endif %}", "{{ 1" + " + 1" * 20 + " }}", "{# c #}{{ 1 }}"])
@pytest.mark.timeout(60)
def test_compiling_is_limited_too(plain: Tokenizer, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_MILLISECONDS", 50)
    with pytest.raises(TokenizerError, match=r"it takes more than 0\.05 seconds$"):
        with_template(plain, piece * 100_000).chat(TALK)


def test_ctrl_c_ends_a_template(plain: Tokenizer) -> None:
    chatty = with_template(plain, ENDLESS.replace("BODY", "{% set y = 1 %}"))
    quick = with_template(plain, "x")
    quick.chat([])  # starts a process
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        chatty.chat([])
    assert quick.chat([]) == "x"


def test_errors_name_file_line_and_reason(plain: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_MILLISECONDS", 200)
    for template, reason in (
        ("\n\n" + ENDLESS.replace("BODY", ""), r"line 3: it takes more than 0\.2 seconds"),
        ("{{ 'a' * 10**11 }}", r"line 1: it takes more than 1,024 MiB of memory"),
        ("{% for i in range(999) %}{{ 'a' * 10**5 }}{% endfor %}", r"it writes more than 16,777,216 characters"),
        ("a\n{{ raise_exception('roles must\nalternate') }}", r"line 2: roles must alternate"),
        ("{{ 1 / 0 }}", r"line 1: division by zero"),
        ("a\n{% if %}", r"line 2: Expected an expression, got 'end of statement block'"),
    ):
        with_template(plain, template).save(tmp_path)
        prefix = re.escape(f"{tmp_path}: the chat template cannot be rendered: ")
        with pytest.raises(TokenizerError, match=rf"^{prefix}{reason}$"):
            Tokenizer.load(tmp_path).chat(TALK)


def test_the_child_imports_nothing_local(plain: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the working directory are not imported."""
    for name in ("json", "jinja2", "weft", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    templates._processes.cache_clear()
    assert with_template(plain, "{{ 1 }}").chat([]) == "1"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "reach",
    [
        "''.__class__.__mro__",
        "''['__class__']",
        "('' | attr('__class__')).__mro__",
        "'{0.__class__.__mro__}'.format(1)",
        "messages.append({})",
        "messages[0].update(x=1)",
        "cycler.__init__.__globals__",
        "self.__init__.__globals__",
        "raise_exception.__globals__",
    ],
)
def test_pythons_internals_are_out_of_reach(plain: Tokenizer, reach: str) -> None:
    try:
        rendered = with_template(plain, "{{ " + reach + " }}").chat(TALK)
    except TokenizerError as error:
        rendered = str(error)
    assert not any(word in rendered for word in ("class '", "function", "module", "object at", "__name__"))


def test_long_templates_and_unusual_characters(plain: Tokenizer) -> None:
    odd = "a\u2028b\u0085c\r\n\ud800 \x00 \U0001f600 {{ x }} {% raw %}"
    assert with_template(plain, "{{ messages[0].content }}").chat([{"role": "user", "content": odd}]) == odd
    long = "x" * 3_000_000
    assert with_template(plain, long).chat([]) == long


SLICED = """{% set rest = messages[1:] %}{%- for m in messages %}{% if loop.index > rest | length %}[INST]{% endif %}
{%- for call in [m.content, m.role] %}{{ call | trim }}{% endfor %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "words", "turns", "count"), [(SLICED, 100, 3000, 1), (WITH_TOOLS, 600, 1000, 500)]
)
def test_long_conversations_are_allowed(plain: Tokenizer, template: str, words: int, turns: int, count: int) -> None:
    content = "a word " * words
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": content} for n in range(turns)]
    text = with_template(plain, template).chat(messages)
    assert text.count("[INST]") == count and text.count("word") == words * turns


def test_threads_get_the_right_answers(plain: Tokenizer) -> None:
    chatty = with_template(plain, "{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}")

    def rendered(n: int) -> bool:
        return chatty.chat([{"role": "user", "content": f"{n} "}]) == f"{n} " * 2000

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(rendered, range(24)))


def test_a_failure_does_not_affect_the_next_rendering(plain: Tokenizer) -> None:
    chatty = with_template(plain, "{% for i in range(messages[0].content | int) %}{{ 'x' * 10**3 }}{% endfor %}")
    with pytest.raises(TokenizerError, match="it writes more than"):
        chatty.chat([{"role": "user", "content": "90000"}])
    assert chatty.chat([{"role": "user", "content": "3"}]) == "x" * 3000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[" * 100_000, "not valid JSON: nested too deeply"),
        ('{"a":' * 100_000, "not valid JSON: nested too deeply"),
        ('{"chat_template": "\\ud800"}', "contains a lone surrogate"),
    ],
)
def test_invalid_settings_are_refused(plain: Tokenizer, settings: str, message: str, tmp_path: Path) -> None:
    plain.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(TokenizerError, match=message) as raised:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"name": ["x"], "template": "no"}, {"name": "default", "template": "yes"}, 3], "yes"),
        ([{"name": {}}], None),
        ([{"name": "default"}], None),
        ({"default": "no"}, None),
    ],
)
def test_the_default_template_is_used(plain: Tokenizer, value: Any, expected: str | None, tmp_path: Path) -> None:
    plain.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    assert Tokenizer.load(tmp_path).chat_template == expected
