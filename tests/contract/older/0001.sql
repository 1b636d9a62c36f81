BEGIN TRANSACTION;
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    epoch  INTEGER NOT NULL,
    state  TEXT NOT NULL,
    doc    TEXT NOT NULL,
    crc    INTEGER NOT NULL,
    PRIMARY KEY (job_id, epoch)
) STRICT;
INSERT INTO "attempts" VALUES('1',1,'ended','{"job_id":"1","epoch":1,"allocation":{"grants":[{"node_id":"n0","node_rank":0,"devices":[0],"cpus":0,"memory_bytes":0,"tasks":1,"first_rank":0}]},"placed_s":1795300759.3867936,"generation":0,"state":"ended","members":[{"node_id":"n0","state":"stopped","port":24701,"why":""}],"generation_s":1795300759.3867936,"running_s":1795300759.4415905,"first_running_s":1795300759.4415905,"ended_s":1795300759.4464023,"resume":null,"exits":[{"rank":0,"node_id":"n0","code":0,"signal":null,"by_us":false,"at_s":1795300759.4377635,"note":""}],"ending":"succeeded","then_restart":false,"why":"","exit_code":0,"causes":["succeeded"]}',3895004489);
INSERT INTO "attempts" VALUES('2',1,'ended','{"job_id":"2","epoch":1,"allocation":{"grants":[{"node_id":"n0","node_rank":0,"devices":[0],"cpus":0,"memory_bytes":0,"tasks":1,"first_rank":0}]},"placed_s":1795300760.222326,"generation":0,"state":"ended","members":[{"node_id":"n0","state":"stopped","port":31333,"why":""}],"generation_s":1795300760.222326,"running_s":1795300760.3295617,"first_running_s":1795300760.3295617,"ended_s":1795300760.351655,"resume":null,"exits":[{"rank":0,"node_id":"n0","code":1,"signal":null,"by_us":false,"at_s":1795300760.3236854,"note":""}],"ending":"failed","then_restart":false,"why":"rank 0 on n0: exit code 1","exit_code":1,"causes":["failed"]}',941409070);
INSERT INTO "attempts" VALUES('3',1,'running','{"job_id":"3","epoch":1,"allocation":{"grants":[{"node_id":"n0","node_rank":0,"devices":[0,1],"cpus":0,"memory_bytes":0,"tasks":2,"first_rank":0},{"node_id":"n1","node_rank":1,"devices":[0,1],"cpus":0,"memory_bytes":0,"tasks":2,"first_rank":2}]},"placed_s":1795300760.8793907,"generation":0,"state":"running","members":[{"node_id":"n0","state":"started","port":25617,"why":""},{"node_id":"n1","state":"started","port":null,"why":""}],"generation_s":1795300760.8793907,"running_s":1795300761.004799,"first_running_s":1795300761.004799,"ended_s":null,"resume":null,"exits":[],"ending":null,"then_restart":false,"why":"","exit_code":null,"causes":[]}',125939983);
CREATE TABLE idempotency (
    user   TEXT NOT NULL,
    key    TEXT NOT NULL,
    job_id TEXT NOT NULL REFERENCES jobs (id),
    doc    TEXT NOT NULL,
    crc    INTEGER NOT NULL,
    PRIMARY KEY (user, key)
) STRICT;
INSERT INTO "idempotency" VALUES('root','9132d6f5cd874dbdc83c5d38a094ea0b','1','{"user":"root","key":"9132d6f5cd874dbdc83c5d38a094ea0b","body_sha256":"eaeb5d1252672f7fa81cc7073f6d16db5b12bcfd88413ce097ec3d98d43d5e83","job_id":"1","at_s":1795300759.3867936}',1404000486);
INSERT INTO "idempotency" VALUES('root','24de1170ae190c40dd517cff8077baa4','2','{"user":"root","key":"24de1170ae190c40dd517cff8077baa4","body_sha256":"fbff1854f0175de70dc193d87d58fdf285cdffb17c9671e23a3a28fcef17ad99","job_id":"2","at_s":1795300760.222326}',87559097);
INSERT INTO "idempotency" VALUES('root','58f24701c9d55b5864d7a5976db9940a','3','{"user":"root","key":"58f24701c9d55b5864d7a5976db9940a","body_sha256":"e2ce97672494d0e473bb52ee83bd51cc75f70a2fb394cf9c91d8628526534cd2","job_id":"3","at_s":1795300760.8793907}',2352287991);
INSERT INTO "idempotency" VALUES('root','89ba249372b4013a290012525fa9476e','4','{"user":"root","key":"89ba249372b4013a290012525fa9476e","body_sha256":"1e04962a446acd6422145f408ad429de5d75c12277f8db9f325a0beb9c2aea1c","job_id":"4","at_s":1795300765.0167828}',3752601489);
INSERT INTO "idempotency" VALUES('root','9e288f3be6772447adff9a460125d1f3','5','{"user":"root","key":"9e288f3be6772447adff9a460125d1f3","body_sha256":"e4b5942daa8ce44958f036e545ca5e2dbf8ae8091e312041b92777904d321d25","job_id":"5","at_s":1795300766.3290706}',1862759630);
CREATE TABLE jobs (
    seq      INTEGER PRIMARY KEY,
    id       TEXT NOT NULL UNIQUE,
    state    TEXT NOT NULL,
    user     TEXT NOT NULL,
    project  TEXT NOT NULL,
    queue    TEXT NOT NULL,
    name     TEXT NOT NULL,
    submit_s REAL NOT NULL,
    ended_s  REAL,
    epoch    INTEGER NOT NULL,
    doc      TEXT NOT NULL,
    crc      INTEGER NOT NULL
) STRICT;
INSERT INTO "jobs" VALUES(1,'1','succeeded','root','default','default','fine',1.79530075938679361344e+09,1.79530075944640231128e+09,1,'{"id":"1","seq":1,"spec":{"name":"fine","role":{"name":"main","argv":["echo","hello"],"script":"","gpus":{"total":1,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true},"user":"root","project":"default","queue":"default","submit_s":1795300759.3867936,"state":"succeeded","reason":"new","detail":"","held":false,"epoch":1,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":1795300759.4415905,"ended_s":1795300759.4464023,"exit_code":0,"cancelled_by":""}',672144245);
INSERT INTO "jobs" VALUES(2,'2','failed','root','default','default','fails',1.79530076022232604028e+09,1.79530076035165500635e+09,1,'{"id":"2","seq":2,"spec":{"name":"fails","role":{"name":"main","argv":["false"],"script":"","gpus":{"total":1,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true},"user":"root","project":"default","queue":"default","submit_s":1795300760.222326,"state":"failed","reason":"new","detail":"rank 0 on n0: exit code 1","held":false,"epoch":1,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":1795300760.3295617,"ended_s":1795300760.351655,"exit_code":1,"cancelled_by":""}',1721360099);
INSERT INTO "jobs" VALUES(3,'3','running','root','default','default','never-ends',1.79530076087939071652e+09,NULL,1,'{"id":"3","seq":3,"spec":{"name":"never-ends","role":{"name":"main","argv":["sleep","1000"],"script":"","gpus":{"total":4,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true},"user":"root","project":"default","queue":"default","submit_s":1795300760.8793907,"state":"running","reason":"new","detail":"","held":false,"epoch":1,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":1795300761.004799,"ended_s":null,"exit_code":null,"cancelled_by":""}',423798921);
INSERT INTO "jobs" VALUES(4,'4','pending','root','default','default','waits',1.79530076501678276064e+09,NULL,0,'{"id":"4","seq":4,"spec":{"name":"waits","role":{"name":"main","argv":["echo","ünï"],"script":"","gpus":{"total":2,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true},"user":"root","project":"default","queue":"default","submit_s":1795300765.0167828,"state":"pending","reason":"new","detail":"","held":false,"epoch":0,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":null,"ended_s":null,"exit_code":null,"cancelled_by":""}',479119717);
INSERT INTO "jobs" VALUES(5,'5','cancelled','root','default','default','cancelled',1.79530076632907056814e+09,1.79530076724392771724e+09,0,'{"id":"5","seq":5,"spec":{"name":"cancelled","role":{"name":"main","argv":["echo","x"],"script":"","gpus":{"total":1,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true},"user":"root","project":"default","queue":"default","submit_s":1795300766.3290706,"state":"cancelled","reason":"new","detail":"","held":false,"epoch":0,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":null,"ended_s":1795300767.2439277,"exit_code":143,"cancelled_by":"root"}',1308182999);
CREATE TABLE migrations (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, sha256 TEXT NOT NULL, applied_s INTEGER NOT NULL
) STRICT;
INSERT INTO "migrations" VALUES(1,'0001_initial','7955fd384f12235b171db59387c6215b28160f94adac7742ad4d825369114ff4',1795300753);
CREATE TABLE nodes (
    id    TEXT PRIMARY KEY NOT NULL,
    state TEXT NOT NULL,
    doc   TEXT NOT NULL,
    crc   INTEGER NOT NULL
) STRICT;
INSERT INTO "nodes" VALUES('n1','up','{"id":"n1","engine":"local","devices":[{"index":0,"uuid":"VIRTUAL-n1-93b164e94695-0","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true},{"index":1,"uuid":"VIRTUAL-n1-93b164e94695-1","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true}],"cpus":2,"memory_bytes":25276514304,"state":"up","supervisor_id":"n1-7d54009eb65149c6","address":"127.0.0.1","hostname":"vm","boot_id":"501ad516-674e-4d85-b7b9-fc707088e923","virtual":true,"labels":{},"cordon":null,"joined_s":1795300755.1194217,"changed_s":1795300755.1194217,"down_cause":"","failures":0}',2335414294);
INSERT INTO "nodes" VALUES('n0','up','{"id":"n0","engine":"local","devices":[{"index":0,"uuid":"VIRTUAL-n0-21729dc7b083-0","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true},{"index":1,"uuid":"VIRTUAL-n0-21729dc7b083-1","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true}],"cpus":2,"memory_bytes":25276514304,"state":"up","supervisor_id":"n0-c880afcb1e094fff","address":"127.0.0.1","hostname":"vm","boot_id":"501ad516-674e-4d85-b7b9-fc707088e923","virtual":true,"labels":{},"cordon":null,"joined_s":1795300755.3364499,"changed_s":1795300755.3364499,"down_cause":"","failures":0}',1034143109);
CREATE TABLE projects (
    id  TEXT PRIMARY KEY NOT NULL,
    doc TEXT NOT NULL,
    crc INTEGER NOT NULL
) STRICT;
INSERT INTO "projects" VALUES('default','{"id":"default","members":[],"admins":[],"created_s":1795300753.7637775}',4218069685);
INSERT INTO "projects" VALUES('nlp','{"id":"nlp","members":["alice"],"admins":[],"created_s":1795300758.5514426}',1820527879);
CREATE TABLE queues (
    id  TEXT PRIMARY KEY NOT NULL,
    doc TEXT NOT NULL,
    crc INTEGER NOT NULL
) STRICT;
INSERT INTO "queues" VALUES('default','{"id":"default","priority":0,"open":true,"parent":null,"quota_gpus":null,"borrow_gpus":null,"lend_gpus":null,"weight":1.0,"gpus_per_user":null,"jobs_per_user":null,"budget_gpu_h":null,"budget_period_s":2592000.0}',1457078544);
CREATE TABLE story (
    seq     INTEGER PRIMARY KEY,
    job_id  TEXT,
    node_id TEXT,
    doc     TEXT NOT NULL,
    crc     INTEGER NOT NULL
) STRICT;
INSERT INTO "story" VALUES(1,NULL,'n1','{"seq":1,"at_s":1795300755.1194217,"kind":"node_up","text":"n1 is up with 2 virtual devices","job_id":null,"epoch":null,"node_id":"n1","by":"","facts":{}}',1575555911);
INSERT INTO "story" VALUES(2,NULL,'n0','{"seq":2,"at_s":1795300755.3364499,"kind":"node_up","text":"n0 is up with 2 virtual devices","job_id":null,"epoch":null,"node_id":"n0","by":"","facts":{}}',2853826666);
INSERT INTO "story" VALUES(3,'1',NULL,'{"seq":3,"at_s":1795300759.3867936,"kind":"submitted","text":"submitted by root for default: 1 GPUs","job_id":"1","epoch":null,"node_id":null,"by":"root","facts":{}}',3324971072);
INSERT INTO "story" VALUES(4,'1',NULL,'{"seq":4,"at_s":1795300759.3867936,"kind":"placed","text":"attempt 1 on n0 (submitted 0.0s ago)","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',1424817387);
INSERT INTO "story" VALUES(5,'1',NULL,'{"seq":5,"at_s":1795300759.4039545,"kind":"starting","text":"1 of 1 nodes ready; ranks start","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',2929341249);
INSERT INTO "story" VALUES(6,'1',NULL,'{"seq":6,"at_s":1795300759.4415905,"kind":"running","text":"all 1 ranks run","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',193686884);
INSERT INTO "story" VALUES(7,'1',NULL,'{"seq":7,"at_s":1795300759.4464023,"kind":"succeeded","text":"succeeded","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',3742250817);
INSERT INTO "story" VALUES(8,'2',NULL,'{"seq":8,"at_s":1795300760.222326,"kind":"submitted","text":"submitted by root for default: 1 GPUs","job_id":"2","epoch":null,"node_id":null,"by":"root","facts":{}}',832036247);
INSERT INTO "story" VALUES(9,'2',NULL,'{"seq":9,"at_s":1795300760.222326,"kind":"placed","text":"attempt 1 on n0 (submitted 0.0s ago)","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',3979968463);
INSERT INTO "story" VALUES(10,'2',NULL,'{"seq":10,"at_s":1795300760.2524664,"kind":"starting","text":"1 of 1 nodes ready; ranks start","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',3889642534);
INSERT INTO "story" VALUES(11,'2',NULL,'{"seq":11,"at_s":1795300760.3295617,"kind":"running","text":"all 1 ranks run","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',1435391797);
INSERT INTO "story" VALUES(12,'2','n0','{"seq":12,"at_s":1795300760.3295617,"kind":"task_failed","text":"rank 0 on n0 ended: exit code 1","job_id":"2","epoch":1,"node_id":"n0","by":"","facts":{}}',2596980636);
INSERT INTO "story" VALUES(13,'2',NULL,'{"seq":13,"at_s":1795300760.351655,"kind":"failed","text":"failed with exit code 1: rank 0 on n0: exit code 1","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',3053954150);
INSERT INTO "story" VALUES(14,'3',NULL,'{"seq":14,"at_s":1795300760.8793907,"kind":"submitted","text":"submitted by root for default: 4 GPUs","job_id":"3","epoch":null,"node_id":null,"by":"root","facts":{}}',693698952);
INSERT INTO "story" VALUES(15,'3',NULL,'{"seq":15,"at_s":1795300760.8793907,"kind":"placed","text":"attempt 1 on n0, n1 (submitted 0.0s ago)","job_id":"3","epoch":1,"node_id":null,"by":"","facts":{}}',1195906937);
INSERT INTO "story" VALUES(16,'3',NULL,'{"seq":16,"at_s":1795300760.9132943,"kind":"starting","text":"2 of 2 nodes ready; ranks start","job_id":"3","epoch":1,"node_id":null,"by":"","facts":{}}',1245380985);
INSERT INTO "story" VALUES(17,'3',NULL,'{"seq":17,"at_s":1795300761.004799,"kind":"running","text":"all 4 ranks run","job_id":"3","epoch":1,"node_id":null,"by":"","facts":{}}',1811294612);
INSERT INTO "story" VALUES(18,'4',NULL,'{"seq":18,"at_s":1795300765.0167828,"kind":"submitted","text":"submitted by root for default: 2 GPUs","job_id":"4","epoch":null,"node_id":null,"by":"root","facts":{}}',4109681288);
INSERT INTO "story" VALUES(19,'5',NULL,'{"seq":19,"at_s":1795300766.3290706,"kind":"submitted","text":"submitted by root for default: 1 GPUs","job_id":"5","epoch":null,"node_id":null,"by":"root","facts":{}}',3408473688);
INSERT INTO "story" VALUES(20,'5',NULL,'{"seq":20,"at_s":1795300767.2439277,"kind":"cancelled","text":"cancelled by root before it ran","job_id":"5","epoch":null,"node_id":null,"by":"root","facts":{}}',2406717648);
CREATE TABLE tokens (
    id        TEXT PRIMARY KEY NOT NULL,
    user      TEXT NOT NULL,
    sha256    TEXT NOT NULL UNIQUE,
    created_s REAL NOT NULL,
    doc       TEXT NOT NULL,
    crc       INTEGER NOT NULL
) STRICT;
INSERT INTO "tokens" VALUES('f405927063c7','root','8a7ec535710fbbba883dbf3b3a2c5da1bb3e50ff6a6b6176118dfcc7b936f2ec',1.7953007537637774944e+09,'{"id":"f405927063c7","user":"root","sha256":"8a7ec535710fbbba883dbf3b3a2c5da1bb3e50ff6a6b6176118dfcc7b936f2ec","created_s":1795300753.7637775,"expires_s":null,"revoked_s":null,"scope":[],"node_id":null,"note":"made by the head for its own state folder"}',3073436429);
INSERT INTO "tokens" VALUES('b28ca3417a82','alice','6a328393f7a809ac0a0e7476a9c58e95f0e54479c8f40c749e6303b2b9c3d026',1.7953007575422706604e+09,'{"id":"b28ca3417a82","user":"alice","sha256":"6a328393f7a809ac0a0e7476a9c58e95f0e54479c8f40c749e6303b2b9c3d026","created_s":1795300757.5422707,"expires_s":1797892757.5422707,"revoked_s":null,"scope":[],"node_id":null,"note":""}',3131215865);
CREATE TABLE users (
    id       TEXT PRIMARY KEY NOT NULL,
    role     TEXT NOT NULL,
    disabled INTEGER NOT NULL,
    doc      TEXT NOT NULL,
    crc      INTEGER NOT NULL
) STRICT;
INSERT INTO "users" VALUES('root','admin',0,'{"id":"root","role":"admin","created_s":1795300753.7637775,"disabled":false}',3115086261);
INSERT INTO "users" VALUES('alice','user',0,'{"id":"alice","role":"user","created_s":1795300756.4117606,"disabled":false}',1756745647);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX jobs_by_user ON jobs (user, state);
CREATE INDEX jobs_by_project ON jobs (project, state);
CREATE INDEX jobs_by_queue ON jobs (queue, state);
CREATE INDEX jobs_by_name ON jobs (name, state);
CREATE UNIQUE INDEX attempts_live ON attempts (job_id) WHERE state <> 'ended';
CREATE INDEX story_by_job ON story (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX story_by_node ON story (node_id) WHERE node_id IS NOT NULL;
COMMIT;
