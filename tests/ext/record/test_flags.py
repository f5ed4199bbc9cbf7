"""The flags of the record and of the job's Prometheus page."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.compose import parse_flags
from slime.ext.record.flags import GROUP
from slime.flags.group import derive_all
from slime.utils.errors import ConfigError


def test_a_port_that_is_none_is_refused():
    message = "--prometheus-port: 65536 is not a whole number of 1 or more and at most 65535"
    with pytest.raises(ConfigError, match=message):
        parse_flags(["--prometheus-port", "65536"])


@pytest.mark.parametrize(("port", "is_on"), [(None, False), (9000, True)])
def test_the_page_turns_on_what_it_shows_of_experts(port, is_on):
    args = Namespace(prometheus_port=port, log_expert_load=False)
    derive_all(args, (GROUP,))
    assert args.log_expert_load is is_on
