"""The whole budget of a profile as sections to print."""

from __future__ import annotations

from .budget import Term, plan
from .errors import SparsekvError
from .figures import figures
from .loader import LoadedProfile


def statement(loaded: LoadedProfile) -> dict[str, list[Term]]:
    """Title -> terms; each memory ends with its sum and its limit.

    Raises:
        SparsekvError: the profile does not state the model's shape.
    """
    profile, shape = loaded.profile, loaded.profile.model.shape
    if shape is None:
        raise SparsekvError(
            f"profile `{loaded.name}` does not state model.shape, which the arithmetic needs",
            hint="`sparsekv profiles schema --field model.shape` lists its keys; config.json of the model has the values",
        )
    budget = plan(profile, shape)
    sections = {"memory of the machine": _balance(budget.host, budget.host_limit)}
    if budget.card_limit is not None:
        sections["memory of each card"] = _balance(budget.card, budget.card_limit)
    return {**sections, "what that gives": figures(profile, shape)}


def _balance(terms: tuple[Term, ...], limit: Term) -> list[Term]:
    total = sum(term.value for term in terms)
    return [*terms, Term("sum", total, " + ".join(term.name for term in terms)), limit]
