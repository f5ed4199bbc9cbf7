"""Filters of groups, of the buffer and of samples."""

from slime.rollout.filter_hub.base_types import DynamicFilterOutput


def leaves(group):
    for item in group:
        if isinstance(item, list):
            yield from leaves(item)
        else:
            yield item


def dynamic_filter(args, group, **kwargs):
    """Keeps a group in which something was generated; the reason names what was missing."""
    samples = list(leaves(group))
    if any(sample.response_length == 0 for sample in samples):
        return DynamicFilterOutput(keep=False, reason="empty")
    lengths = {sample.response_length for sample in samples}
    if len(lengths) == 1 and lengths == {1}:
        return DynamicFilterOutput(keep=False, reason="one_token", keep_when_insufficient=True)
    return DynamicFilterOutput(keep=True)


def keep_odd_groups(args, group):
    """The bool form."""
    return next(leaves(group)).group_index % 2 == 1


def buffer_newest_first(args, rollout_id, buffer, num_samples):
    """Take the groups that entered the buffer last, and delete them from it."""
    count = min(num_samples, len(buffer))
    taken = list(reversed(buffer[len(buffer) - count :]))
    del buffer[len(buffer) - count :]
    return taken


def drop_long_calls(args, groups):
    """--rollout-sample-filter-path: samples with too many tool calls do not train."""
    for sample in leaves(groups):
        if sample.metadata.get("calls", 0) >= args.calc_max_turns:
            sample.remove_sample = True


SEEN = []


def remember_all(args, all_groups, get_samples):
    """--rollout-all-samples-process-path: filtered groups are in here too."""
    SEEN.append(sum(1 for _ in leaves(all_groups)))
