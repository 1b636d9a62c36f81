-- Several heads: the leader's properties, the registered heads, and the secrets that all of them share.

ALTER TABLE leader
    ADD COLUMN beat                bigint NOT NULL DEFAULT 0,
    ADD COLUMN lease_s             double precision NOT NULL DEFAULT 0,
    ADD COLUMN grants_s            double precision NOT NULL DEFAULT 0,
    ADD COLUMN long_leases_until_s double precision NOT NULL DEFAULT 0;

CREATE TABLE heads (
    name         text COLLATE "C" PRIMARY KEY,
    head_id      text COLLATE "C" NOT NULL,
    url          text NOT NULL,
    version      text NOT NULL,
    account      text NOT NULL,
    token_sha256 text NOT NULL,
    started_s    double precision NOT NULL,
    seen_s       double precision NOT NULL
);

-- In plain text, like the environments of jobs: read access to this database means control of the cluster (docs/high-availability.md).
CREATE TABLE shared (
    name  text COLLATE "C" PRIMARY KEY,
    value text NOT NULL
);
