"""Models that are filled from a file are built without numbers."""

import subprocess
import sys

from weft.models.build import build
from weft.models.presets import preset
from weft.nn.init import hollow


def test_a_hollow_model_has_the_shapes_and_no_numbers() -> None:
    for name in ("gpt-tiny", "llama-tiny", "bert-tiny", "vaswani-tiny"):
        settings = preset(name)
        with hollow():
            empty = build(settings)
        assert all(p.is_meta for p in empty.parameters())
        shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in empty.state_dict().items()}
        assert shapes == {key: (t.shape, t.dtype) for key, t in build(settings).state_dict().items()}


def test_building_a_hollow_model_does_not_import_the_compiler() -> None:
    code = (
        "import sys; from weft.models.build import build; from weft.models.presets import preset\n"
        "from weft.nn.init import hollow\n"
        "with hollow(): build(preset('gpt-tiny'))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
