-- Archived jobs leave with their keys.
CREATE INDEX idempotency_by_job ON idempotency (job_id);
