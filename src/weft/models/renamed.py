"""Parameters that have another name than in checkpoints that older versions wrote."""

RENAMED = {"output.follows.": "output.next_sentence."}  # 0.1


def current_name(name: str) -> str:
    """The name that a saved parameter, or an optimizer's moment of one (`exp_avg/name`), has today."""
    moment, slash, parameter = name.rpartition("/")
    for old, new in RENAMED.items():
        if parameter.startswith(old):
            return moment + slash + new + parameter.removeprefix(old)
    return name
