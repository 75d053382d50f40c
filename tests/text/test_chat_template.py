"""Chat templates: what transformers renders, and programs that fail, reach out or never end."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import resource
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from weft.errors import TokenizerError
from weft.text import template as template_module
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

# the ways of LLaMA 3.1 and Mistral: what is not given, a date, slices, namespaces, turns counted
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

# the tag that marks replies, as templates for training have it
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
{{ '%s-%05d' | format('a', 3) }}
{%- for i in range(3) %}{{ i }}{{ cycler('a', 'b').next() }}{% endfor %}"""


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return build_tokenizer(Byte(), [])


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer.from_json(tokenizer.to_json(), tokenizer.roles, template)


@pytest.mark.parametrize("reply", [True, False])
@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS, MARKED, JSON])
def test_the_text_is_that_of_transformers(plain: Tokenizer, template: str, reply: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    chatty = with_template(plain, template)
    chatty.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rendered = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=reply)
    assert len(rendered) > 50
    assert chatty.chat(TALK, reply=reply) == rendered


def test_the_date_is_todays(plain: Tokenizer) -> None:
    assert with_template(plain, "{{ strftime_now('%Y') }}").chat([]) == str(datetime.now().year)


DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = WHAT %}{% endfor %}{{ ns.x | length }}"
MANY = "{% for i in range(99999) %}{% for j in range(99999) %}WHAT{% endfor %}{% endfor %}"
LAUGHS = "{% set ns = namespace(x=['ab']) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"

# two values that hold each other many times over: what Python's own code does with them takes longer than anyone lives
NESTED = (
    "{% set ns = namespace(x=OPEN 1 CLOSE, y=OPEN 1 CLOSE) %}{% for i in range(60) %}"
    "{% set ns.x = OPEN ns.x, ns.x CLOSE %}{% set ns.y = OPEN ns.y, ns.y CLOSE %}{% endfor %}"
)
LISTS, TUPLES = NESTED.replace("OPEN", "[").replace("CLOSE", "]"), NESTED.replace("OPEN", "(").replace("CLOSE", ",)")


@pytest.mark.parametrize(
    "template",
    [
        LISTS + "{{ ns.x in [ns.y] }}",
        LISTS + "{{ [ns.x].count(ns.y) }}",
        LISTS + "{{ [ns.x, ns.y] | sort }}",
        TUPLES + "{{ {ns.x: 1} }}",
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
        "{{ lipsum(n=100000) }}",
        "{{ 10**(10**7) }}",
        "{{ 10**9999999999 }}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 'a'*10**11 }}",
        "{{ 99999999999 * 'a' }}",
        "{{ [0]*10**11 }}",
        "{{ 'x'|center(10**10) }}",
        "{{ 'x'.center(10**10) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x'['zfill'](9999999999) }}",
        "{{ ('x'|attr('rjust'))(9999999999) }}",
        "{{ ('\t' * 10**6).expandtabs(10**6) }}",
        "{{ (1).to_bytes(10**10, 'big') }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w='9999999999') }}",
        "{{ ('{0}' * 10**6).format('x' * 10**6) }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
        "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
        "{{ range(99999) | join('b' * 10**6) }}",
        "{{ ('b' * 10**6).join('a' * 10**6) }}",
        "{{ ('\n' * 10**6) | indent('b' * 10**6, true, true) }}",
        "{{ [[[1]]] | tojson(indent=10**9) }}",
        "{{ range(99999) | list | tojson(separators=('b' * 10**6, ':')) }}",
        "{{ 1.5 | round(10**9, 'ceil') }}",
        "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
        "{{ 'x' | batch(10**10, 'y') | list }}",
        DOUBLED.replace("WHAT", "ns.x + ns.x"),
        DOUBLED.replace("WHAT", "ns.x ~ ns.x"),
        DOUBLED.replace("WHAT", "ns.x.join([ns.x, ns.x])"),
        LAUGHS + "{{ ns.x }}",
        LAUGHS + "{{ ns.x | tojson }}",
        LAUGHS + "{{ ns.x | string | length }}",
        LAUGHS + "{{ ns }}",
        LAUGHS + "{{ '%s' % ns.x }}",
        LAUGHS + "{{ ('' ~ ns.x) | length }}",
        MANY.replace("WHAT", "x"),
        MANY.replace("WHAT", "{% set y = 1 %}"),
        "{% set all %}" + MANY.replace("WHAT", "a text of some length " * 99) + "{% endset %}",
        "{% for i in range(99999) if range(99999) | select('none') | list %}{% endfor %}",
        "{% set s = 'x' * 10**7 %}{% for i in range(99999) %}{% if s | unique | first == 3 %}{% endif %}"
        "{% set n = s | select('none') | list %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{% set s = 'x' * 10**7 %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
        "{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
        "{% set s = 'x' * 10**7 %}{% set ns = namespace(l=[]) %}{% for i in range(99999) %}"
        "{% set ns.l = ns.l + [s.upper()] %}{% endfor %}",
    ],
)
@pytest.mark.timeout(60)
def test_what_fails_or_never_ends_is_one_line(plain: Tokenizer, template: str) -> None:
    chatty = with_template(plain, template)
    before, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(TokenizerError, match=r"^the chat template cannot be rendered: .") as raised:
        chatty.chat(TALK)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    after, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 2 and ended.ru_utime - others.ru_utime < 15  # of those before it too
    assert after.ru_maxrss - before.ru_maxrss < 300_000 and ended.ru_maxrss < 1_500_000  # KiB


def test_the_reason_is_given(plain: Tokenizer) -> None:
    for template, reason in (
        (LISTS + "{{ ns.x == ns.y }}", r"it takes more than 1 second"),
        ("{{ 'a' * 10**11 }}", r"it needs more than 1024 MiB of memory"),
        ("{% for i in range(999) %}{{ 'a' * 10**5 }}{% endfor %}", r"it writes more than 16,777,216 characters"),
        ("{{ raise_exception('roles must\nalternate') }}", r"roles must alternate"),
        ("{{ 1 / 0 }}", r"division by zero"),
        ("{% if %}", r"Expected an expression, got 'end of statement block'"),
    ):
        with pytest.raises(TokenizerError, match=rf"^the chat template cannot be rendered: {reason}$"):
            with_template(plain, template).chat(TALK)


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
def test_nothing_but_text_is_in_reach(plain: Tokenizer, reach: str) -> None:
    try:
        rendered = with_template(plain, "{{ " + reach + " }}").chat(TALK)
    except TokenizerError as error:
        rendered = str(error)
    assert not any(word in rendered for word in ("class '", "function", "module", "object at", "__name__"))


def test_a_template_of_any_length_and_text_of_any_kind(plain: Tokenizer) -> None:
    odd = "a\u2028b\u0085c\r\n\ud800 \x00 \U0001f600 {{ x }} {% raw %}"
    assert with_template(plain, "{{ messages[0].content }}").chat([{"role": "user", "content": odd}]) == odd
    long = "x" * 3_000_000
    assert with_template(plain, long).chat([]) == long


def test_threads_and_forks_get_their_own_answers(plain: Tokenizer) -> None:
    chatty = with_template(plain, "{{ messages[0].content * 1000 }}")

    def rendered(n: int) -> bool:
        return chatty.chat([{"role": "user", "content": f"{n} "}]) == f"{n} " * 1000

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(rendered, range(200)))
    child = os.fork()
    if child == 0:
        os._exit(0 if all(map(rendered, range(100))) else 1)
    assert all(map(rendered, range(100, 200)))
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_that_was_ended_is_started_again(plain: Tokenizer) -> None:
    chatty = with_template(plain, CHATML)
    before = chatty.chat(TALK)
    process = template_module._worker._process
    assert process is not None
    process.kill()
    process.wait()
    assert chatty.chat(TALK) == before
    assert template_module._worker._process is not process


def test_a_failure_leaves_the_next_rendering_alone(plain: Tokenizer) -> None:
    chatty = with_template(plain, "{% for m in messages %}{{ m.content }}{{ 'x' * (m.content | int) }}{% endfor %}")
    with pytest.raises(TokenizerError, match="more than 1024 MiB"):
        chatty.chat([{"role": "user", "content": "99999999999"}])
    assert chatty.chat([{"role": "user", "content": "3"}]) == "3xxx"


def test_a_long_conversation_is_no_bomb(plain: Tokenizer) -> None:
    long = [{"role": "user" if n % 2 == 0 else "assistant", "content": "a word " * 600} for n in range(1000)]
    text = with_template(plain, WITH_TOOLS).chat(long)
    assert text.count("[INST]") == 500


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("[" * 100_000, "not valid JSON: nested too deeply"),
        ('{"a":' * 100_000, "not valid JSON: nested too deeply"),
        ('{"chat_template": "\\ud800"}', "chat_template: contains a lone surrogate"),
    ],
)
def test_settings_that_are_none(plain: Tokenizer, settings: str, says: str, tmp_path: Path) -> None:
    plain.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(TokenizerError, match=says) as raised:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([{"name": ["x"], "template": "no"}, {"name": "default", "template": "yes"}, 3], "yes"),
        ([{"name": {}}], None),
        ([{"name": "default"}], None),
        ({"default": "no"}, None),
    ],
)
def test_of_several_templates_the_default(plain: Tokenizer, value: Any, found: str | None, tmp_path: Path) -> None:
    plain.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    assert Tokenizer.load(tmp_path).chat_template == found
