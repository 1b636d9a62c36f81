-- The labels of jobs, to find jobs by them. They follow from the documents: triggers write them, as a job's labels never change.
CREATE TABLE job_labels (
    label   text COLLATE "C" NOT NULL,
    text    text COLLATE "C" NOT NULL,
    job_seq bigint NOT NULL,
    PRIMARY KEY (label, text, job_seq)
);
CREATE INDEX job_labels_by_name ON job_labels (label, job_seq);
CREATE INDEX job_labels_by_job ON job_labels (job_seq);
INSERT INTO job_labels
SELECT one ->> 0, one ->> 1, jobs.seq
FROM jobs, json_array_elements(jobs.doc::json #> '{spec,labels}') AS one
WHERE position('"labels":[[' IN jobs.doc) > 0;
CREATE FUNCTION add_job_labels() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO job_labels
    SELECT one ->> 0, one ->> 1, NEW.seq FROM json_array_elements(NEW.doc::json #> '{spec,labels}') AS one
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE FUNCTION remove_job_labels() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM job_labels WHERE job_seq = OLD.seq;
    RETURN NULL;
END $$;
CREATE TRIGGER job_labels_of_new_jobs AFTER INSERT ON jobs FOR EACH ROW
WHEN (position('"labels":[[' IN NEW.doc) > 0) EXECUTE FUNCTION add_job_labels();
CREATE TRIGGER job_labels_of_removed_jobs AFTER DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION remove_job_labels();
