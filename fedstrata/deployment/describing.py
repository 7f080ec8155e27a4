"""A deployment in sentences, for those who must agree to it: what leaves a site, the rules, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedstrata.deployment.rules import Rules, SecureRules, SiteRules


def rules_in_words(rules: Rules) -> list[str]:
    """List the server's rules with their values and what they mean; those of secure aggregation only where it is on."""
    hidden = () if rules.secure else tuple(field.name for field in dataclasses.fields(SecureRules)[1:])
    return [_in_words(rules, field) for field in dataclasses.fields(rules) if field.name not in hidden]


def site_rules_in_words() -> list[str]:
    """List what every site decides for itself, with the defaults."""
    flags = {
        "secure_only": "--secure-only",
        "statistics": "--no-statistics",
        "min_samples": "--min-samples",
        "lifetime_epsilon": "--lifetime-epsilon",
        "lifetime_delta": "--lifetime-delta",
    }
    fields = {field.name: field for field in dataclasses.fields(SiteRules)}
    by_flag = [f"{_in_words(SiteRules(), fields[name])} ({flag})" for name, flag in flags.items()]
    others = ", ".join(name for name in fields if name not in flags)
    return [*by_flag, f"what else its own policy says (--policy): {others}"]


def _in_words(rules: Rules | SiteRules, field: dataclasses.Field[Any]) -> str:
    value = getattr(rules, field.name)
    shown = {None: "none", True: "yes", False: "no"}.get(value, value) if not isinstance(value, float) else f"{value:g}"
    return f"{field.name} = {shown}: {field.metadata['doc']}"


def what_leaves_a_site(rules: Rules, sums: bool, surveys: list[str]) -> list[str]:
    """List what leaves a site: ``sums`` of its samples for ``normalise``, answers to the ``surveys`` of parts."""
    masked = ", under masks: the server sees the sum over all sites" if rules.secure else ""
    told = [
        "once: the shape of a sample, the names of the classes, the numbers of its training and test samples, and how "
        "many of the former each class has",
        f"with every round: the upload of the method{masked}",
        "with every round, in the clear: the mean training loss, the operations that training took, accuracy and loss "
        "in its own tests",
    ]
    if sums:
        told.insert(
            1,
            "once: how many numbers each channel of its training samples has, their sum and the sum of their squares, "
            f"for the mean and deviation of all sites{masked}",
        )
    if surveys:
        told.append(f"before some rounds, in the clear: the answers to the surveys of {' and '.join(surveys)}")
    return told


def what_is_refused(rules: Rules) -> list[str]:
    """List what makes the server refuse a reply."""
    of_site = [
        "other class names, sample shapes or constants than more than half of the sites have, or the rules say",
        f"after {rules.max_refusals} refusals the site is left out",
    ]
    if rules.secure:
        return [
            f"a sum that no uploads can have, or whose mean has a norm above {rules.norm_limit:g} times the model's; "
            f"after {rules.max_refusals} in a row the run stops",
            *of_site,
        ]
    return [
        "a NaN or an infinity, other layers, shapes, types or masks than asked for, a broken checksum, too many bytes "
        "or tensors",
        f"a norm above {rules.norm_limit:g} times that of the model that was sent",
        *of_site,
    ]
