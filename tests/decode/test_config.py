"""`parameters` describes every setting of sampling and beam search, from the fields alone."""

from weft.decode.config import Beam, Rules, Sampling, parameters


def test_every_setting_is_described_once() -> None:
    found = parameters()
    names = [parameter.name for parameter in found]
    assert set(names) == Sampling.model_fields.keys() | Beam.model_fields.keys()
    assert len(names) == len(set(names))
    assert all(parameter.description.endswith(".") for parameter in found)
    assert {parameter.name for parameter in found if parameter.group == "rules"} == Rules.model_fields.keys()


def test_a_parameter_carries_type_default_bounds_and_option() -> None:
    by_name = {parameter.name: parameter for parameter in parameters()}
    top_k, typical, seed = by_name["top_k"], by_name["typical_p"], by_name["seed"]
    assert (top_k.type, top_k.default, top_k.bounds, top_k.option) == (int, None, {"gt": 0, "le": 10**9}, "--top-k")
    assert (typical.type, typical.group, typical.option) == (float, "sampling", "--typical")
    assert (seed.default, seed.bounds) == (0, {"ge": 0, "lt": 2**63})
    assert by_name["logit_bias"].default == {}
    assert by_name["logit_bias"].option is None
