"""The wire, in one place: protobuf messages (``v1``), NATS subjects, the error table, packed forms."""
