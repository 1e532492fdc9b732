"""Names that dashboards rely on."""

from shoal_kvindex.metrics import CATALOGUE


def test_the_catalogue_names_these_metrics() -> None:
    assert [entry.name.removeprefix("shoal_kvindex_") for entry in CATALOGUE.entries] == [
        "match_seconds",
        "matched_blocks_total",
        "recalls_total",
        "recalled_blocks_total",
        "waits_total",
        "waiting",
        "pending_matches_total",
        "untold_claims_total",
        "pending_blocks",
        "settled_blocks_total",
        "reports_total",
        "reported_objects_total",
        "copies_dropped_total",
        "blocks",
        "evicted_blocks_total",
        "stores",
        "pending_changes",
        "written_changes_total",
        "failed_writes_total",
        "overflowed_changes_total",
        "load_seconds",
        "listings_total",
        "listed_objects_total",
        "swept_blocks_total",
        "housekeeping_failures_total",
        "published_changes_total",
        "waiting_for_log",
        "missed_changes_total",
        "dropped_renewals_total",
        "has_lease",
    ]
