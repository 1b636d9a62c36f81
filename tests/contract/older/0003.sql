BEGIN TRANSACTION;
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    epoch  INTEGER NOT NULL,
    state  TEXT NOT NULL,
    doc    TEXT NOT NULL,
    crc    INTEGER NOT NULL,
    PRIMARY KEY (job_id, epoch)
) STRICT;
INSERT INTO "attempts" VALUES('1',1,'ended','{"job_id":"1","epoch":1,"allocation":{"grants":[{"node_id":"n0","node_rank":0,"devices":[0],"cpus":0,"memory_bytes":0,"tasks":1,"first_rank":0}]},"placed_s":1795300792.5729215,"generation":0,"state":"ended","members":[{"node_id":"n0","state":"stopped","port":22584,"why":""}],"generation_s":1795300792.5729215,"running_s":1795300792.7208445,"first_running_s":1795300792.7208445,"ended_s":1795300792.79157,"resume":null,"exits":[{"rank":0,"node_id":"n0","code":0,"signal":null,"by_us":false,"at_s":1795300792.6965468,"note":""}],"ending":"succeeded","then_restart":false,"why":"","exit_code":0,"causes":["succeeded"]}',274957671);
INSERT INTO "attempts" VALUES('2',1,'ended','{"job_id":"2","epoch":1,"allocation":{"grants":[{"node_id":"n0","node_rank":0,"devices":[0],"cpus":0,"memory_bytes":0,"tasks":1,"first_rank":0}]},"placed_s":1795300793.5162845,"generation":0,"state":"ended","members":[{"node_id":"n0","state":"stopped","port":27112,"why":""}],"generation_s":1795300793.5162845,"running_s":1795300793.5723102,"first_running_s":1795300793.5723102,"ended_s":1795300793.5892138,"resume":null,"exits":[{"rank":0,"node_id":"n0","code":1,"signal":null,"by_us":false,"at_s":1795300793.574109,"note":""}],"ending":"failed","then_restart":false,"why":"rank 0 on n0: exit code 1","exit_code":1,"causes":["failed"]}',263998879);
INSERT INTO "attempts" VALUES('3',1,'running','{"job_id":"3","epoch":1,"allocation":{"grants":[{"node_id":"n0","node_rank":0,"devices":[0,1],"cpus":0,"memory_bytes":0,"tasks":2,"first_rank":0},{"node_id":"n1","node_rank":1,"devices":[0,1],"cpus":0,"memory_bytes":0,"tasks":2,"first_rank":2}]},"placed_s":1795300794.3263357,"generation":0,"state":"running","members":[{"node_id":"n0","state":"started","port":24530,"why":""},{"node_id":"n1","state":"started","port":null,"why":""}],"generation_s":1795300794.3263357,"running_s":1795300794.502008,"first_running_s":1795300794.502008,"ended_s":null,"resume":null,"exits":[],"ending":null,"then_restart":false,"why":"","exit_code":null,"causes":[]}',544876847);
CREATE TABLE idempotency (
    user   TEXT NOT NULL,
    key    TEXT NOT NULL,
    job_id TEXT NOT NULL REFERENCES jobs (id),
    doc    TEXT NOT NULL,
    crc    INTEGER NOT NULL,
    PRIMARY KEY (user, key)
) STRICT;
INSERT INTO "idempotency" VALUES('root','b33b869db8e215d2f93594acd6d7fb4a','1','{"user":"root","key":"b33b869db8e215d2f93594acd6d7fb4a","body_sha256":"eaeb5d1252672f7fa81cc7073f6d16db5b12bcfd88413ce097ec3d98d43d5e83","job_id":"1","at_s":1795300792.5729215}',2188788785);
INSERT INTO "idempotency" VALUES('root','437ebf0df9edf90bbad0a525ae0f5132','2','{"user":"root","key":"437ebf0df9edf90bbad0a525ae0f5132","body_sha256":"fbff1854f0175de70dc193d87d58fdf285cdffb17c9671e23a3a28fcef17ad99","job_id":"2","at_s":1795300793.5162845}',778069455);
INSERT INTO "idempotency" VALUES('root','1070eeb3e732cf9a47d32994531909ae','3','{"user":"root","key":"1070eeb3e732cf9a47d32994531909ae","body_sha256":"e2ce97672494d0e473bb52ee83bd51cc75f70a2fb394cf9c91d8628526534cd2","job_id":"3","at_s":1795300794.3263357}',512421490);
INSERT INTO "idempotency" VALUES('root','8775fbafb190c5ae51362aaded2e71d2','4','{"user":"root","key":"8775fbafb190c5ae51362aaded2e71d2","body_sha256":"1e04962a446acd6422145f408ad429de5d75c12277f8db9f325a0beb9c2aea1c","job_id":"4","at_s":1795300798.2635775}',1712131824);
INSERT INTO "idempotency" VALUES('root','91badf6f4f4d66a288ca1c26a34903b6','5','{"user":"root","key":"91badf6f4f4d66a288ca1c26a34903b6","body_sha256":"e4b5942daa8ce44958f036e545ca5e2dbf8ae8091e312041b92777904d321d25","job_id":"5","at_s":1795300799.0565166}',1204944622);
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
INSERT INTO "jobs" VALUES(1,'1','succeeded','root','default','default','fine',1.79530079257292151445e+09,1795300792.79157,1,'{"id":"1","seq":1,"spec":{"name":"fine","role":{"name":"main","argv":["echo","hello"],"script":"","gpus":{"total":1,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false},"user":"root","project":"default","queue":"default","submit_s":1795300792.5729215,"state":"succeeded","reason":"new","detail":"","held":false,"epoch":1,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":1795300792.7208445,"ended_s":1795300792.79157,"exit_code":0,"cancelled_by":""}',1586007242);
INSERT INTO "jobs" VALUES(2,'2','failed','root','default','default','fails',1.79530079351628446583e+09,1.79530079358921384807e+09,1,'{"id":"2","seq":2,"spec":{"name":"fails","role":{"name":"main","argv":["false"],"script":"","gpus":{"total":1,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false},"user":"root","project":"default","queue":"default","submit_s":1795300793.5162845,"state":"failed","reason":"new","detail":"rank 0 on n0: exit code 1","held":false,"epoch":1,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":1795300793.5723102,"ended_s":1795300793.5892138,"exit_code":1,"cancelled_by":""}',1261693646);
INSERT INTO "jobs" VALUES(3,'3','running','root','default','default','never-ends',1.7953007943263356686e+09,NULL,1,'{"id":"3","seq":3,"spec":{"name":"never-ends","role":{"name":"main","argv":["sleep","1000"],"script":"","gpus":{"total":4,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false},"user":"root","project":"default","queue":"default","submit_s":1795300794.3263357,"state":"running","reason":"new","detail":"","held":false,"epoch":1,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":1795300794.502008,"ended_s":null,"exit_code":null,"cancelled_by":""}',3889787480);
INSERT INTO "jobs" VALUES(4,'4','pending','root','default','default','waits',1.79530079826357746126e+09,NULL,0,'{"id":"4","seq":4,"spec":{"name":"waits","role":{"name":"main","argv":["echo","ünï"],"script":"","gpus":{"total":2,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false},"user":"root","project":"default","queue":"default","submit_s":1795300798.2635775,"state":"pending","reason":"new","detail":"","held":false,"epoch":0,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":null,"ended_s":null,"exit_code":null,"cancelled_by":""}',1256883751);
INSERT INTO "jobs" VALUES(5,'5','cancelled','root','default','default','cancelled',1.79530079905651664736e+09,1.79530079994363880153e+09,0,'{"id":"5","seq":5,"spec":{"name":"cancelled","role":{"name":"main","argv":["echo","x"],"script":"","gpus":{"total":1,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false},"user":"root","project":"default","queue":"default","submit_s":1795300799.0565166,"state":"cancelled","reason":"new","detail":"","held":false,"epoch":0,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":null,"ended_s":1795300799.9436388,"exit_code":143,"cancelled_by":"root"}',2946934052);
CREATE TABLE migrations (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, sha256 TEXT NOT NULL, applied_s INTEGER NOT NULL
) STRICT;
INSERT INTO "migrations" VALUES(1,'0001_initial','7955fd384f12235b171db59387c6215b28160f94adac7742ad4d825369114ff4',1795300786);
INSERT INTO "migrations" VALUES(2,'0002_reservations','a90972bffb18303c2ada52626b846009fa48a5f16b26e3f6454094bdc7138786',1795300786);
INSERT INTO "migrations" VALUES(3,'0003_spent','5d762634dd8da291a625e6be2dfd4a7d2796e8ec5172d5bbfff3b703dc073b6f',1795300786);
CREATE TABLE nodes (
    id    TEXT PRIMARY KEY NOT NULL,
    state TEXT NOT NULL,
    doc   TEXT NOT NULL,
    crc   INTEGER NOT NULL
) STRICT;
INSERT INTO "nodes" VALUES('n0','up','{"id":"n0","engine":"local","devices":[{"index":0,"uuid":"VIRTUAL-n0-7e5f646bbbdc-0","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true},{"index":1,"uuid":"VIRTUAL-n0-7e5f646bbbdc-1","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true}],"cpus":2,"memory_bytes":25276514304,"state":"up","supervisor_id":"n0-b9f285d889f92d37","address":"127.0.0.1","hostname":"vm","boot_id":"501ad516-674e-4d85-b7b9-fc707088e923","virtual":true,"labels":{},"cordon":null,"joined_s":1795300788.5207517,"changed_s":1795300788.5207517,"down_cause":"","failures":0}',60077971);
INSERT INTO "nodes" VALUES('n1','up','{"id":"n1","engine":"local","devices":[{"index":0,"uuid":"VIRTUAL-n1-ca8e68284a24-0","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true},{"index":1,"uuid":"VIRTUAL-n1-ca8e68284a24-1","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true}],"cpus":2,"memory_bytes":25276514304,"state":"up","supervisor_id":"n1-9c9274c028b68d42","address":"127.0.0.1","hostname":"vm","boot_id":"501ad516-674e-4d85-b7b9-fc707088e923","virtual":true,"labels":{},"cordon":null,"joined_s":1795300788.7333066,"changed_s":1795300788.7333066,"down_cause":"","failures":0}',1214405734);
CREATE TABLE projects (
    id  TEXT PRIMARY KEY NOT NULL,
    doc TEXT NOT NULL,
    crc INTEGER NOT NULL
) STRICT;
INSERT INTO "projects" VALUES('default','{"id":"default","members":[],"admins":[],"created_s":1795300786.8807492}',2385914762);
INSERT INTO "projects" VALUES('nlp','{"id":"nlp","members":["alice"],"admins":[],"created_s":1795300791.7710605}',940985272);
CREATE TABLE queues (
    id  TEXT PRIMARY KEY NOT NULL,
    doc TEXT NOT NULL,
    crc INTEGER NOT NULL
) STRICT;
INSERT INTO "queues" VALUES('default','{"id":"default","priority":0,"open":true,"parent":null,"quota_gpus":null,"borrow_gpus":null,"lend_gpus":null,"weight":1.0,"gpus_per_user":null,"jobs_per_user":null,"budget_gpu_h":null,"budget_period_s":2592000.0}',1457078544);
CREATE TABLE reservations (
    id    TEXT PRIMARY KEY NOT NULL,
    ended INTEGER NOT NULL,
    doc   TEXT NOT NULL,
    crc   INTEGER NOT NULL
) STRICT;
CREATE TABLE spent (
    queue TEXT PRIMARY KEY NOT NULL,
    doc   TEXT NOT NULL,
    crc   INTEGER NOT NULL
) STRICT;
INSERT INTO "spent" VALUES('default','{"queue":"default","at_s":1795300793.5892138,"period_s":1793664000.0,"gpu_s":0.2915778160095215,"decayed_gpu_s":0.2915775856866133}',1500737683);
CREATE TABLE story (
    seq     INTEGER PRIMARY KEY,
    job_id  TEXT,
    node_id TEXT,
    doc     TEXT NOT NULL,
    crc     INTEGER NOT NULL
) STRICT;
INSERT INTO "story" VALUES(1,NULL,'n0','{"seq":1,"at_s":1795300788.5207517,"kind":"node_up","text":"n0 is up with 2 virtual devices","job_id":null,"epoch":null,"node_id":"n0","by":"","facts":{}}',3259680048);
INSERT INTO "story" VALUES(2,NULL,'n1','{"seq":2,"at_s":1795300788.7333066,"kind":"node_up","text":"n1 is up with 2 virtual devices","job_id":null,"epoch":null,"node_id":"n1","by":"","facts":{}}',3049229657);
INSERT INTO "story" VALUES(3,'1',NULL,'{"seq":3,"at_s":1795300792.5729215,"kind":"submitted","text":"submitted by root for default: 1 GPUs","job_id":"1","epoch":null,"node_id":null,"by":"root","facts":{}}',3401195757);
INSERT INTO "story" VALUES(4,'1',NULL,'{"seq":4,"at_s":1795300792.5729215,"kind":"placed","text":"attempt 1 on n0 (submitted 0.0s ago)","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',2436052058);
INSERT INTO "story" VALUES(5,'1',NULL,'{"seq":5,"at_s":1795300792.614877,"kind":"starting","text":"1 of 1 nodes ready; ranks start","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',2531465484);
INSERT INTO "story" VALUES(6,'1',NULL,'{"seq":6,"at_s":1795300792.7208445,"kind":"running","text":"all 1 ranks run","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',1701854463);
INSERT INTO "story" VALUES(7,'1',NULL,'{"seq":7,"at_s":1795300792.79157,"kind":"succeeded","text":"succeeded","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',1110252233);
INSERT INTO "story" VALUES(8,'2',NULL,'{"seq":8,"at_s":1795300793.5162845,"kind":"submitted","text":"submitted by root for default: 1 GPUs","job_id":"2","epoch":null,"node_id":null,"by":"root","facts":{}}',1996019384);
INSERT INTO "story" VALUES(9,'2',NULL,'{"seq":9,"at_s":1795300793.5162845,"kind":"placed","text":"attempt 1 on n0 (submitted 0.0s ago)","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',3323865067);
INSERT INTO "story" VALUES(10,'2',NULL,'{"seq":10,"at_s":1795300793.5360813,"kind":"starting","text":"1 of 1 nodes ready; ranks start","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',2031341194);
INSERT INTO "story" VALUES(11,'2',NULL,'{"seq":11,"at_s":1795300793.5723102,"kind":"running","text":"all 1 ranks run","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',1793638891);
INSERT INTO "story" VALUES(12,'2','n0','{"seq":12,"at_s":1795300793.5892138,"kind":"task_failed","text":"rank 0 on n0 ended: exit code 1","job_id":"2","epoch":1,"node_id":"n0","by":"","facts":{}}',764853806);
INSERT INTO "story" VALUES(13,'2',NULL,'{"seq":13,"at_s":1795300793.5892138,"kind":"failed","text":"failed with exit code 1: rank 0 on n0: exit code 1","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',923673081);
INSERT INTO "story" VALUES(14,'3',NULL,'{"seq":14,"at_s":1795300794.3263357,"kind":"submitted","text":"submitted by root for default: 4 GPUs","job_id":"3","epoch":null,"node_id":null,"by":"root","facts":{}}',2894948891);
INSERT INTO "story" VALUES(15,'3',NULL,'{"seq":15,"at_s":1795300794.3263357,"kind":"placed","text":"attempt 1 on n0, n1 (submitted 0.0s ago)","job_id":"3","epoch":1,"node_id":null,"by":"","facts":{}}',3456908326);
INSERT INTO "story" VALUES(16,'3',NULL,'{"seq":16,"at_s":1795300794.4113626,"kind":"starting","text":"2 of 2 nodes ready; ranks start","job_id":"3","epoch":1,"node_id":null,"by":"","facts":{}}',4235189724);
INSERT INTO "story" VALUES(17,'3',NULL,'{"seq":17,"at_s":1795300794.502008,"kind":"running","text":"all 4 ranks run","job_id":"3","epoch":1,"node_id":null,"by":"","facts":{}}',1600616658);
INSERT INTO "story" VALUES(18,'4',NULL,'{"seq":18,"at_s":1795300798.2635775,"kind":"submitted","text":"submitted by root for default: 2 GPUs","job_id":"4","epoch":null,"node_id":null,"by":"root","facts":{}}',920136081);
INSERT INTO "story" VALUES(19,'5',NULL,'{"seq":19,"at_s":1795300799.0565166,"kind":"submitted","text":"submitted by root for default: 1 GPUs","job_id":"5","epoch":null,"node_id":null,"by":"root","facts":{}}',2737250931);
INSERT INTO "story" VALUES(20,'5',NULL,'{"seq":20,"at_s":1795300799.9436388,"kind":"cancelled","text":"cancelled by root before it ran","job_id":"5","epoch":null,"node_id":null,"by":"root","facts":{}}',716160468);
CREATE TABLE tokens (
    id        TEXT PRIMARY KEY NOT NULL,
    user      TEXT NOT NULL,
    sha256    TEXT NOT NULL UNIQUE,
    created_s REAL NOT NULL,
    doc       TEXT NOT NULL,
    crc       INTEGER NOT NULL
) STRICT;
INSERT INTO "tokens" VALUES('4f9edf8f4810','root','003f1d62eb1ddd5023516fbb9beda824ee426f1daf106a9847e0326b4e15dc87',1.79530078688074922563e+09,'{"id":"4f9edf8f4810","user":"root","sha256":"003f1d62eb1ddd5023516fbb9beda824ee426f1daf106a9847e0326b4e15dc87","created_s":1795300786.8807492,"expires_s":null,"revoked_s":null,"scope":[],"node_id":null,"note":"made by the head for its own state folder"}',3476185882);
INSERT INTO "tokens" VALUES('d2925306b4b8','alice','4b3277af9fc0a914fe3395c9dfe425ac945c5116424e0df44aa6057ded5ec759',1.79530079088576602938e+09,'{"id":"d2925306b4b8","user":"alice","sha256":"4b3277af9fc0a914fe3395c9dfe425ac945c5116424e0df44aa6057ded5ec759","created_s":1795300790.885766,"expires_s":1797892790.885766,"revoked_s":null,"scope":[],"node_id":null,"note":""}',1698160879);
CREATE TABLE users (
    id       TEXT PRIMARY KEY NOT NULL,
    role     TEXT NOT NULL,
    disabled INTEGER NOT NULL,
    doc      TEXT NOT NULL,
    crc      INTEGER NOT NULL
) STRICT;
INSERT INTO "users" VALUES('root','admin',0,'{"id":"root","role":"admin","created_s":1795300786.8807492,"disabled":false}',1660590643);
INSERT INTO "users" VALUES('alice','user',0,'{"id":"alice","role":"user","created_s":1795300789.8456066,"disabled":false}',684769622);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX jobs_by_user ON jobs (user, state);
CREATE INDEX jobs_by_project ON jobs (project, state);
CREATE INDEX jobs_by_queue ON jobs (queue, state);
CREATE INDEX jobs_by_name ON jobs (name, state);
CREATE UNIQUE INDEX attempts_live ON attempts (job_id) WHERE state <> 'ended';
CREATE INDEX story_by_job ON story (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX story_by_node ON story (node_id) WHERE node_id IS NOT NULL;
CREATE INDEX reservations_live ON reservations (id) WHERE ended = 0;
COMMIT;
