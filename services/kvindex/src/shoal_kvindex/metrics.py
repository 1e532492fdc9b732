"""Every metric of kvindex, and what to do when it moves."""

from shoal_runtime.metrics import Catalogue

CATALOGUE = Catalogue("shoal_kvindex")

MATCH_SECONDS = CATALOGUE.histogram(
    "match_seconds",
    "Time to answer one Match.",
    action="Above a millisecond: the process is starved of CPU, or reports come in too large deliveries.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25),
)
MATCHED_BLOCKS = CATALOGUE.counter(
    "matched_blocks_total",
    "Blocks asked for by Match, by whether they were part of a hit.",
    ["verdict"],
    action="The hit rate of the store. When it falls: look at copies dropped, evicted blocks and lifetimes.",
)
RECALLS = CATALOGUE.counter(
    "recalls_total",
    "Matches that asked Postgres for blocks which the bound of the map dropped, by what came of it; those that are "
    "late, away or refused count a miss.",
    ["outcome"],
    action="Any: raise max_blocks. late: Postgres is slow, its answer serves the next match; away: it is down.",
)
RECALLED_BLOCKS = CATALOGUE.counter(
    "recalled_blocks_total", "Blocks that came back from Postgres into the map.", action="Many: raise max_blocks."
)
WAITS = CATALOGUE.counter(
    "waits_total",
    "Await calls by how they ended.",
    ["outcome"],
    action="not_stored: the store is slow or reports are lost; refused: raise max_waiters.",
)
WAITING = CATALOGUE.gauge("waiting", "Await calls in progress.", action="Grows when the store falls behind.")
PENDING_MATCHES = CATALOGUE.counter(
    "pending_matches_total",
    "Matches by what they came to beside the hit: the rest was claimed, another request was said to compute it (told), "
    "or there was no room for the claim (full).",
    ["outcome"],
    action="told against claimed: how much computing is shared; full: raise max_pending_blocks.",
)
UNTOLD_CLAIMS = CATALOGUE.counter(
    "untold_claims_total",
    "Claims that the other instances were not told of, because too many were under way to the log.",
    action="Prefixes may be computed twice; look at the latency of NATS.",
)
PENDING_BLOCKS = CATALOGUE.gauge(
    "pending_blocks", "Blocks that requests have computed now.", action="Grows with prefill queues."
)
SETTLED_BLOCKS = CATALOGUE.counter(
    "settled_blocks_total",
    "Blocks of settled requests: stored and kept, awaiting their report, or claims pushed out by the bound.",
    ["verdict"],
    action="dropped: raise max_claims. Many awaited: reports are slow, or engines do not store answers.",
)
REPORTS = CATALOGUE.counter(
    "reports_total",
    "Reports of lmcache servers by the gate's verdict; malformed ones count once a delivery.",
    ["verdict"],
    action="after_gap: deliveries were lost, the stores are listed; malformed: versions do not fit; "
    "stale: a server came back with an older clock, or two share an id.",
)
REPORTED_OBJECTS = CATALOGUE.counter(
    "reported_objects_total",
    "Objects in admitted reports by what happened to them.",
    ["change"],
    action="unshared: a level-2 adapter is not declared shared, its copies are not used.",
)
COPIES_DROPPED = CATALOGUE.counter(
    "copies_dropped_total",
    "Times that all DRAM copies of a lmcache server were dropped from the directory, by reason.",
    ["reason"],
    action="gap: look for lost deliveries; silent: the server or the network is down.",
)
BLOCKS = CATALOGUE.gauge("blocks", "Blocks in the map.", action="At max_blocks the oldest are evicted.")
EVICTED_BLOCKS = CATALOGUE.counter(
    "evicted_blocks_total", "Blocks that the bound of the map pushed out.", action="Raise max_blocks."
)
STORES = CATALOGUE.gauge(
    "stores", "Registered lmcache servers.", action="Fewer than there are: look at their coordinator address."
)
PENDING_CHANGES = CATALOGUE.gauge(
    "pending_changes", "Changes not yet in Postgres.", action="Grows while Postgres is away or too slow."
)
WRITTEN_CHANGES = CATALOGUE.counter(
    "written_changes_total", "Changes written to Postgres.", action="The write load; see write_interval_s."
)
FAILED_WRITES = CATALOGUE.counter(
    "failed_writes_total", "Attempts to write to Postgres that failed.", action="Look at Postgres; serving goes on."
)
OVERFLOWED_CHANGES = CATALOGUE.counter(
    "overflowed_changes_total",
    "Changes dropped because Postgres was away too long.",
    action="After the next restart the index knows less; raise max_pending_changes or mend Postgres sooner.",
)
LOAD_SECONDS = CATALOGUE.gauge(
    "load_seconds", "Time the last load from Postgres took.", action="Until it is done, Match answers UNAVAILABLE."
)
LISTINGS = CATALOGUE.counter(
    "listings_total",
    "Listings of the shared level by the lease holder, by how they ended.",
    ["outcome"],
    action="failed: the reason stands in readiness; until one is done the index misses blocks that are stored.",
)
LISTED_OBJECTS = CATALOGUE.counter(
    "listed_objects_total",
    "Objects on which a listing and the directory differed: found and taken in, or gone and taken out.",
    ["change"],
    action="Many without a fence or an outage: reports are lost without a gap, or somebody else changes the store.",
)
SWEPT_BLOCKS = CATALOGUE.counter(
    "swept_blocks_total",
    "Blocks that the lease holder marked, and what became of them.",
    ["verdict"],
    action="evicted: the shared level is too small for the lifetimes; many renewed: lifetimes are too short.",
)
HOUSEKEEPING_FAILURES = CATALOGUE.counter(
    "housekeeping_failures_total",
    "Listings, sweeps and counts that had to be ended, by what failed. They are tried again.",
    ["work", "kind"],
    action="cannot_list: the store's adapter must list; away or refused: look at the lmcache servers.",
)
PUBLISHED_CHANGES = CATALOGUE.counter(
    "published_changes_total",
    "Changes heard here, by what became of them: in the log, applied here to be logged later, or applied and dropped.",
    ["fate"],
    action="applied_here: NATS was away; dropped: away for too long, other instances miss hits until the next listing.",
)
WAITING_FOR_LOG = CATALOGUE.gauge(
    "waiting_for_log", "Blocks and objects in changes that wait for NATS.", action="Look at NATS; serving goes on."
)
MISSED_CHANGES = CATALOGUE.counter(
    "missed_changes_total",
    "Changes that the log had dropped before this instance came to them.",
    action="The instance was cut off for too long or is too slow; gaps of reports follow.",
)
DROPPED_RENEWALS = CATALOGUE.counter(
    "dropped_renewals_total",
    "Renewals by Match and Settle here that the other instances were not told, for want of room.",
    action="Blocks may expire early; look at NATS.",
)
HAS_LEASE = CATALOGUE.gauge(
    "has_lease",
    "1 on the instance that writes, lists and sweeps.",
    action="The sum over all instances is 1; 0 for long: look at Postgres.",
)
