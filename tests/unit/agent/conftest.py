from __future__ import annotations

import pytest

from slime.agent.adapters import http_requests
from slime.servers import bounded_site
from slime.utils.bounded_log import PERIOD_S


@pytest.fixture(autouse=True)
def _warnings_of_earlier_tests_do_not_count() -> None:
    for log in (http_requests.told, bounded_site.told):
        log._begun, log._count = -PERIOD_S, 0
