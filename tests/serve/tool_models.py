"""Tiny imported chat models whose templates have tools, one per format of calls. Their weights are random."""

from dataclasses import replace
from pathlib import Path

import torch
from tests.interop.hf_models import exported, fresh_model

from weft.api.import_model import import_model
from weft.models.presets import llama
from weft.text.config import BPE, Specials
from weft.text.tokenizer import Tokenizer, build_tokenizer

TURNS = (
    "{{ bos_token }}{% if tools %}{{ '<s>tools ' + tools | tojson + '</s>' }}{% endif %}"
    "{% for message in messages %}{{ '<s>' + message.role + ' ' + message.content }}{% if message.tool_calls %}"
)
END = "{% endif %}{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
TEMPLATES = {
    "hermes": '{% for call in message.tool_calls %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", '
    "\"arguments\": ' + call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}",
    "llama3": "{{ '{\"name\": \"' + message.tool_calls[0].function.name + '\", ' }}{{ '\"parameters\": ' }}"
    "{{ message.tool_calls[0].function.arguments | tojson + '}' }}",
    "mistral": "{{ '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}{{ {'name': call.function.name, 'arguments': "
    "call.function.arguments, 'id': call.id} | tojson }}{% endfor %}{{ ']' }}",
}


def write_models(folder: Path) -> Path:
    """Import a model for each format, and one whose template has no tools, as `plain`."""
    (folder / "hf").mkdir(parents=True)
    torch.manual_seed(1)
    text = "the cat sat on the mat. " * 8
    for name in (*TEMPLATES, "plain"):
        special = ("[TOOL_CALLS]",) if name == "mistral" else ()
        specials = Specials(bos="<s>", eos="</s>", extra=special) if special else Specials(bos="<s>", eos="</s>")
        tokenizer = build_tokenizer(BPE(vocab_size=268, specials=specials), [text])
        template = TURNS + TEMPLATES[name] + END if name != "plain" else TURNS.replace("tools", "none") + END
        tokenizer = Tokenizer.from_json(tokenizer.to_json(), tokenizer.roles, template)
        settings = llama(2, 32, 4, d_ff=48, context=1024, vocab_size=tokenizer.vocab_size, kv_heads=2)
        import_model(
            exported(replace(fresh_model(settings), tokenizer=tokenizer), folder / "hf" / name), folder / "runs" / name
        )
    return folder / "runs"
