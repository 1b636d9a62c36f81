BEGIN TRANSACTION;
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    epoch  INTEGER NOT NULL,
    state  TEXT NOT NULL,
    doc    TEXT NOT NULL,
    crc    INTEGER NOT NULL,
    PRIMARY KEY (job_id, epoch)
) STRICT;
INSERT INTO "attempts" VALUES('1',1,'ended','{"job_id":"1","epoch":1,"allocation":{"grants":[{"node_id":"n0","node_rank":0,"devices":[0],"cpus":0,"memory_bytes":0,"tasks":1,"first_rank":0}]},"placed_s":1795300825.151838,"generation":0,"state":"ended","members":[{"node_id":"n0","state":"stopped","port":20799,"why":"","probe_port":0,"bad_links":[]}],"generation_s":1795300825.151838,"running_s":1795300825.3112473,"first_running_s":1795300825.3112473,"ended_s":1795300825.3209245,"resume":null,"exits":[{"rank":0,"node_id":"n0","code":0,"signal":null,"by_us":false,"at_s":1795300825.3083944,"note":""}],"ending":"succeeded","then_restart":false,"why":"","exit_code":0,"causes":["succeeded"],"kept":false}',1129737650);
INSERT INTO "attempts" VALUES('2',1,'ended','{"job_id":"2","epoch":1,"allocation":{"grants":[{"node_id":"n0","node_rank":0,"devices":[0],"cpus":0,"memory_bytes":0,"tasks":1,"first_rank":0}]},"placed_s":1795300826.2246008,"generation":0,"state":"ended","members":[{"node_id":"n0","state":"stopped","port":28811,"why":"","probe_port":0,"bad_links":[]}],"generation_s":1795300826.2246008,"running_s":1795300826.2706213,"first_running_s":1795300826.2706213,"ended_s":1795300826.2890291,"resume":null,"exits":[{"rank":0,"node_id":"n0","code":1,"signal":null,"by_us":false,"at_s":1795300826.2720966,"note":""}],"ending":"failed","then_restart":false,"why":"rank 0 on n0: exit code 1","exit_code":1,"causes":["failed"],"kept":false}',2832065125);
INSERT INTO "attempts" VALUES('3',1,'running','{"job_id":"3","epoch":1,"allocation":{"grants":[{"node_id":"n0","node_rank":0,"devices":[0,1],"cpus":0,"memory_bytes":0,"tasks":2,"first_rank":0},{"node_id":"n1","node_rank":1,"devices":[0,1],"cpus":0,"memory_bytes":0,"tasks":2,"first_rank":2}]},"placed_s":1795300827.0562153,"generation":0,"state":"running","members":[{"node_id":"n0","state":"started","port":22249,"why":"","probe_port":0,"bad_links":[]},{"node_id":"n1","state":"started","port":null,"why":"","probe_port":0,"bad_links":[]}],"generation_s":1795300827.0562153,"running_s":1795300827.239903,"first_running_s":1795300827.239903,"ended_s":null,"resume":null,"exits":[],"ending":null,"then_restart":false,"why":"","exit_code":null,"causes":[],"kept":false}',3337468940);
CREATE TABLE calibrations (
    id  TEXT PRIMARY KEY NOT NULL,
    doc TEXT NOT NULL,
    crc INTEGER NOT NULL
) STRICT;
CREATE TABLE idempotency (
    user   TEXT NOT NULL,
    key    TEXT NOT NULL,
    job_id TEXT NOT NULL REFERENCES jobs (id),
    doc    TEXT NOT NULL,
    crc    INTEGER NOT NULL,
    PRIMARY KEY (user, key)
) STRICT;
INSERT INTO "idempotency" VALUES('root','5aed366214b088088c1629a67590045c','1','{"user":"root","key":"5aed366214b088088c1629a67590045c","body_sha256":"eaeb5d1252672f7fa81cc7073f6d16db5b12bcfd88413ce097ec3d98d43d5e83","job_id":"1","at_s":1795300825.151838}',3860159969);
INSERT INTO "idempotency" VALUES('root','355972799b9a569d9606b5526d32a45c','2','{"user":"root","key":"355972799b9a569d9606b5526d32a45c","body_sha256":"fbff1854f0175de70dc193d87d58fdf285cdffb17c9671e23a3a28fcef17ad99","job_id":"2","at_s":1795300826.2246008}',982708750);
INSERT INTO "idempotency" VALUES('root','3efaf2b6df3bd60228b936bac7a1e82a','3','{"user":"root","key":"3efaf2b6df3bd60228b936bac7a1e82a","body_sha256":"e2ce97672494d0e473bb52ee83bd51cc75f70a2fb394cf9c91d8628526534cd2","job_id":"3","at_s":1795300827.0562153}',3062842746);
INSERT INTO "idempotency" VALUES('root','f5255933c99d4a5cc116341ceae69635','4','{"user":"root","key":"f5255933c99d4a5cc116341ceae69635","body_sha256":"1e04962a446acd6422145f408ad429de5d75c12277f8db9f325a0beb9c2aea1c","job_id":"4","at_s":1795300831.4701242}',2569694882);
INSERT INTO "idempotency" VALUES('root','c9697f035301a109f6b12fd9f129fdc1','5','{"user":"root","key":"c9697f035301a109f6b12fd9f129fdc1","body_sha256":"e4b5942daa8ce44958f036e545ca5e2dbf8ae8091e312041b92777904d321d25","job_id":"5","at_s":1795300832.9127538}',1931418218);
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
INSERT INTO "jobs" VALUES(1,'1','succeeded','root','default','default','fine',1.7953008251518380642e+09,1.79530082532092452054e+09,1,'{"id":"1","seq":1,"spec":{"name":"fine","role":{"name":"main","argv":["echo","hello"],"script":"","gpus":{"total":1,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","requirements":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false,"plan":"","nodelist":[],"exclude":[],"slurm":[]},"user":"root","project":"default","queue":"default","submit_s":1795300825.151838,"state":"succeeded","reason":"new","detail":"","held":false,"epoch":1,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":1795300825.3112473,"ended_s":1795300825.3209245,"exit_code":0,"cancelled_by":""}',827961851);
INSERT INTO "jobs" VALUES(2,'2','failed','root','default','default','fails',1.79530082622460079194e+09,1.79530082628902912136e+09,1,'{"id":"2","seq":2,"spec":{"name":"fails","role":{"name":"main","argv":["false"],"script":"","gpus":{"total":1,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","requirements":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false,"plan":"","nodelist":[],"exclude":[],"slurm":[]},"user":"root","project":"default","queue":"default","submit_s":1795300826.2246008,"state":"failed","reason":"new","detail":"rank 0 on n0: exit code 1","held":false,"epoch":1,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":1795300826.2706213,"ended_s":1795300826.2890291,"exit_code":1,"cancelled_by":""}',1035621308);
INSERT INTO "jobs" VALUES(3,'3','running','root','default','default','never-ends',1.79530082705621528622e+09,NULL,1,'{"id":"3","seq":3,"spec":{"name":"never-ends","role":{"name":"main","argv":["sleep","1000"],"script":"","gpus":{"total":4,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","requirements":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false,"plan":"","nodelist":[],"exclude":[],"slurm":[]},"user":"root","project":"default","queue":"default","submit_s":1795300827.0562153,"state":"running","reason":"new","detail":"","held":false,"epoch":1,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":1795300827.239903,"ended_s":null,"exit_code":null,"cancelled_by":""}',72270869);
INSERT INTO "jobs" VALUES(4,'4','pending','root','default','default','waits',1.79530083147012424473e+09,NULL,0,'{"id":"4","seq":4,"spec":{"name":"waits","role":{"name":"main","argv":["echo","ünï"],"script":"","gpus":{"total":2,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","requirements":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false,"plan":"","nodelist":[],"exclude":[],"slurm":[]},"user":"root","project":"default","queue":"default","submit_s":1795300831.4701242,"state":"pending","reason":"new","detail":"","held":false,"epoch":0,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":null,"ended_s":null,"exit_code":null,"cancelled_by":""}',4013019635);
INSERT INTO "jobs" VALUES(5,'5','cancelled','root','default','default','cancelled',1.79530083291275382043e+09,1.79530083394357085229e+09,0,'{"id":"5","seq":5,"spec":{"name":"cancelled","role":{"name":"main","argv":["echo","x"],"script":"","gpus":{"total":1,"nodes":null,"per_node":null,"model":null,"memory_gib":null,"or_models":[],"nodes_max":null,"uneven":false},"cpus":0,"memory_bytes":0,"launch":"per_device","tasks_per_node":null},"workdir":"/tmp","upload":"","env":[],"setup":"","requirements":"","image":"","project":"","queue":"","priority":0,"time_limit_s":null,"retry":0,"checkpoint":"","warm":false,"hold":false,"grace_s":30.0,"collective_timeout_s":600.0,"labels":[],"dependencies":[],"array":"","array_max":null,"begin_s":null,"spread":{"within":"","required":false,"slice_nodes":0,"slice_within":""},"reservation":"","preemptible":true,"saves_on_stop":false,"plan":"","nodelist":[],"exclude":[],"slurm":[]},"user":"root","project":"default","queue":"default","submit_s":1795300832.9127538,"state":"cancelled","reason":"new","detail":"","held":false,"epoch":0,"not_before_s":0.0,"checkpoints":[],"progress_step":0,"losses":0,"stalls":0,"user_retries":0,"preemptions":0,"moves":0,"attained_s":0.0,"array":null,"unmet":[],"avoid":[],"started_s":null,"ended_s":1795300833.9435709,"exit_code":143,"cancelled_by":"root"}',4131544294);
CREATE TABLE migrations (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, sha256 TEXT NOT NULL, applied_s INTEGER NOT NULL
) STRICT;
INSERT INTO "migrations" VALUES(1,'0001_initial','7955fd384f12235b171db59387c6215b28160f94adac7742ad4d825369114ff4',1795300819);
INSERT INTO "migrations" VALUES(2,'0002_reservations','a90972bffb18303c2ada52626b846009fa48a5f16b26e3f6454094bdc7138786',1795300819);
INSERT INTO "migrations" VALUES(3,'0003_spent','5d762634dd8da291a625e6be2dfd4a7d2796e8ec5172d5bbfff3b703dc073b6f',1795300819);
INSERT INTO "migrations" VALUES(4,'0004_calibrations','4d4cf6b38c66d79bfe03216a404473b6b32d06f5393ffbe4f09f58aa2ddffc3f',1795300819);
CREATE TABLE nodes (
    id    TEXT PRIMARY KEY NOT NULL,
    state TEXT NOT NULL,
    doc   TEXT NOT NULL,
    crc   INTEGER NOT NULL
) STRICT;
INSERT INTO "nodes" VALUES('n1','up','{"id":"n1","engine":"local","devices":[{"index":0,"uuid":"VIRTUAL-n1-f0d96cda9074-0","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true,"nvlinks":[],"pci_bus":"","pcie":"","numa":null},{"index":1,"uuid":"VIRTUAL-n1-f0d96cda9074-1","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true,"nvlinks":[],"pci_bus":"","pcie":"","numa":null}],"cpus":2,"memory_bytes":25276514304,"state":"up","supervisor_id":"n1-200b1a13b5ce0c30","address":"127.0.0.1","hostname":"vm","boot_id":"501ad516-674e-4d85-b7b9-fc707088e923","virtual":true,"labels":{},"cordon":null,"joined_s":1795300821.6159482,"changed_s":1795300821.6159482,"down_cause":"","failures":0,"per_attempt":false,"others":{"devices":[],"cpus":0,"memory_bytes":0,"who":[]},"slow":"","nics":[{"name":"eth0","kind":"ethernet","up":true,"bits_per_s":null,"numa":null,"pci_bus":"virtio2"}],"probe_port":0,"sees_head_files":true}',775251158);
INSERT INTO "nodes" VALUES('n0','up','{"id":"n0","engine":"local","devices":[{"index":0,"uuid":"VIRTUAL-n0-23b78efe9b62-0","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true,"nvlinks":[],"pci_bus":"","pcie":"","numa":null},{"index":1,"uuid":"VIRTUAL-n0-23b78efe9b62-1","model":"virtual","memory_bytes":12638257152,"virtual":true,"healthy":true,"nvlinks":[],"pci_bus":"","pcie":"","numa":null}],"cpus":2,"memory_bytes":25276514304,"state":"up","supervisor_id":"n0-0ce682b539c86881","address":"127.0.0.1","hostname":"vm","boot_id":"501ad516-674e-4d85-b7b9-fc707088e923","virtual":true,"labels":{},"cordon":null,"joined_s":1795300821.771792,"changed_s":1795300821.771792,"down_cause":"","failures":0,"per_attempt":false,"others":{"devices":[],"cpus":0,"memory_bytes":0,"who":[]},"slow":"","nics":[{"name":"eth0","kind":"ethernet","up":true,"bits_per_s":null,"numa":null,"pci_bus":"virtio2"}],"probe_port":0,"sees_head_files":true}',3691121623);
CREATE TABLE projects (
    id  TEXT PRIMARY KEY NOT NULL,
    doc TEXT NOT NULL,
    crc INTEGER NOT NULL
) STRICT;
INSERT INTO "projects" VALUES('default','{"id":"default","members":[],"admins":[],"created_s":1795300819.3836303}',459777228);
INSERT INTO "projects" VALUES('nlp','{"id":"nlp","members":["alice"],"admins":[],"created_s":1795300824.1742935}',969801106);
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
INSERT INTO "spent" VALUES('default','{"queue":"default","at_s":1795300826.2890291,"period_s":1793664000.0,"gpu_s":0.23351478576660156,"decayed_gpu_s":0.2335145793995769}',3909069144);
CREATE TABLE story (
    seq     INTEGER PRIMARY KEY,
    job_id  TEXT,
    node_id TEXT,
    doc     TEXT NOT NULL,
    crc     INTEGER NOT NULL
) STRICT;
INSERT INTO "story" VALUES(1,NULL,'n1','{"seq":1,"at_s":1795300821.6159482,"kind":"node_up","text":"n1 is up with 2 virtual devices","job_id":null,"epoch":null,"node_id":"n1","by":"","facts":{}}',2015527939);
INSERT INTO "story" VALUES(2,NULL,'n0','{"seq":2,"at_s":1795300821.771792,"kind":"node_up","text":"n0 is up with 2 virtual devices","job_id":null,"epoch":null,"node_id":"n0","by":"","facts":{}}',225792338);
INSERT INTO "story" VALUES(3,'1',NULL,'{"seq":3,"at_s":1795300825.151838,"kind":"submitted","text":"submitted by root for default: 1 GPUs","job_id":"1","epoch":null,"node_id":null,"by":"root","facts":{}}',1856677393);
INSERT INTO "story" VALUES(4,'1',NULL,'{"seq":4,"at_s":1795300825.151838,"kind":"placed","text":"attempt 1 on n0 (submitted 0.0s ago)","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',1637064585);
INSERT INTO "story" VALUES(5,'1',NULL,'{"seq":5,"at_s":1795300825.2503545,"kind":"starting","text":"1 of 1 nodes ready; ranks start","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',448156114);
INSERT INTO "story" VALUES(6,'1',NULL,'{"seq":6,"at_s":1795300825.3112473,"kind":"running","text":"all 1 ranks run","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',2987914249);
INSERT INTO "story" VALUES(7,'1',NULL,'{"seq":7,"at_s":1795300825.3209245,"kind":"succeeded","text":"succeeded","job_id":"1","epoch":1,"node_id":null,"by":"","facts":{}}',922294668);
INSERT INTO "story" VALUES(8,'2',NULL,'{"seq":8,"at_s":1795300826.2246008,"kind":"submitted","text":"submitted by root for default: 1 GPUs","job_id":"2","epoch":null,"node_id":null,"by":"root","facts":{}}',2374796058);
INSERT INTO "story" VALUES(9,'2',NULL,'{"seq":9,"at_s":1795300826.2246008,"kind":"placed","text":"attempt 1 on n0 (submitted 0.0s ago)","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',992908485);
INSERT INTO "story" VALUES(10,'2',NULL,'{"seq":10,"at_s":1795300826.2355664,"kind":"starting","text":"1 of 1 nodes ready; ranks start","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',4125792371);
INSERT INTO "story" VALUES(11,'2',NULL,'{"seq":11,"at_s":1795300826.2706213,"kind":"running","text":"all 1 ranks run","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',4241095683);
INSERT INTO "story" VALUES(12,'2','n0','{"seq":12,"at_s":1795300826.279528,"kind":"task_failed","text":"rank 0 on n0 ended: exit code 1","job_id":"2","epoch":1,"node_id":"n0","by":"","facts":{}}',56561505);
INSERT INTO "story" VALUES(13,'2',NULL,'{"seq":13,"at_s":1795300826.2890291,"kind":"failed","text":"failed with exit code 1: rank 0 on n0: exit code 1","job_id":"2","epoch":1,"node_id":null,"by":"","facts":{}}',2784842103);
INSERT INTO "story" VALUES(14,'3',NULL,'{"seq":14,"at_s":1795300827.0562153,"kind":"submitted","text":"submitted by root for default: 4 GPUs","job_id":"3","epoch":null,"node_id":null,"by":"root","facts":{}}',1349780640);
INSERT INTO "story" VALUES(15,'3',NULL,'{"seq":15,"at_s":1795300827.0562153,"kind":"placed","text":"attempt 1 on n0, n1 (submitted 0.0s ago)","job_id":"3","epoch":1,"node_id":null,"by":"","facts":{}}',2587740132);
INSERT INTO "story" VALUES(16,'3',NULL,'{"seq":16,"at_s":1795300827.1488433,"kind":"starting","text":"2 of 2 nodes ready; ranks start","job_id":"3","epoch":1,"node_id":null,"by":"","facts":{}}',2514363050);
INSERT INTO "story" VALUES(17,'3',NULL,'{"seq":17,"at_s":1795300827.239903,"kind":"running","text":"all 4 ranks run","job_id":"3","epoch":1,"node_id":null,"by":"","facts":{}}',633558846);
INSERT INTO "story" VALUES(18,'4',NULL,'{"seq":18,"at_s":1795300831.4701242,"kind":"submitted","text":"submitted by root for default: 2 GPUs","job_id":"4","epoch":null,"node_id":null,"by":"root","facts":{}}',216764096);
INSERT INTO "story" VALUES(19,'5',NULL,'{"seq":19,"at_s":1795300832.9127538,"kind":"submitted","text":"submitted by root for default: 1 GPUs","job_id":"5","epoch":null,"node_id":null,"by":"root","facts":{}}',2173920234);
INSERT INTO "story" VALUES(20,'5',NULL,'{"seq":20,"at_s":1795300833.9435709,"kind":"cancelled","text":"cancelled by root before it ran","job_id":"5","epoch":null,"node_id":null,"by":"root","facts":{}}',3590115164);
CREATE TABLE tokens (
    id        TEXT PRIMARY KEY NOT NULL,
    user      TEXT NOT NULL,
    sha256    TEXT NOT NULL UNIQUE,
    created_s REAL NOT NULL,
    doc       TEXT NOT NULL,
    crc       INTEGER NOT NULL
) STRICT;
INSERT INTO "tokens" VALUES('933c190f7506','root','32470a60297ad048966dbc714641a21dbfa8188a923e7be4bd1e68c5b0c1bb62',1.79530081938363027574e+09,'{"id":"933c190f7506","user":"root","sha256":"32470a60297ad048966dbc714641a21dbfa8188a923e7be4bd1e68c5b0c1bb62","created_s":1795300819.3836303,"expires_s":null,"revoked_s":null,"scope":[],"node_id":null,"note":"made by the head for its own state folder"}',3986986505);
INSERT INTO "tokens" VALUES('a7a63227fc21','alice','48e4e498d8b4218cfdba25e01db2b875f2cae76c2d7fd1aef315a638051f477a',1.79530082341121244434e+09,'{"id":"a7a63227fc21","user":"alice","sha256":"48e4e498d8b4218cfdba25e01db2b875f2cae76c2d7fd1aef315a638051f477a","created_s":1795300823.4112124,"expires_s":1797892823.4112124,"revoked_s":null,"scope":[],"node_id":null,"note":""}',407135699);
CREATE TABLE users (
    id       TEXT PRIMARY KEY NOT NULL,
    role     TEXT NOT NULL,
    disabled INTEGER NOT NULL,
    doc      TEXT NOT NULL,
    crc      INTEGER NOT NULL
) STRICT;
INSERT INTO "users" VALUES('root','admin',0,'{"id":"root","role":"admin","created_s":1795300819.3836303,"disabled":false}',480198712);
INSERT INTO "users" VALUES('alice','user',0,'{"id":"alice","role":"user","created_s":1795300822.8326814,"disabled":false}',4229685791);
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
