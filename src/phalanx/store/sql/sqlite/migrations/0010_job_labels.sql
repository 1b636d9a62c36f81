-- The labels of jobs, to find jobs by them. They follow from the documents: triggers write them, as a job's labels never change.
CREATE TABLE job_labels (
    label   TEXT NOT NULL,
    text    TEXT NOT NULL,
    job_seq INTEGER NOT NULL,
    PRIMARY KEY (label, text, job_seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX job_labels_by_name ON job_labels (label, job_seq);
CREATE INDEX job_labels_by_job ON job_labels (job_seq);
INSERT INTO job_labels
SELECT json_extract(one.value, '$[0]'), json_extract(one.value, '$[1]'), jobs.seq
FROM jobs, json_each(jobs.doc, '$.spec.labels') AS one
WHERE instr(jobs.doc, '"labels":[[') > 0;
CREATE TRIGGER job_labels_of_new_jobs AFTER INSERT ON jobs WHEN instr(NEW.doc, '"labels":[[') > 0
BEGIN
    INSERT OR REPLACE INTO job_labels
    SELECT json_extract(one.value, '$[0]'), json_extract(one.value, '$[1]'), NEW.seq
    FROM json_each(NEW.doc, '$.spec.labels') AS one;
END;
CREATE TRIGGER job_labels_of_removed_jobs AFTER DELETE ON jobs
BEGIN
    DELETE FROM job_labels WHERE job_seq = OLD.seq;
END;
