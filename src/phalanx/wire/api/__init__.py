"""JSON bodies of the API routes under /v1/, as records. The head encodes them, the CLI decodes them.

Fields added later have a default, and unknown fields are ignored, so that a release is compatible with the one before and after it.
Times are Unix seconds (`_s`), names of amounts carry their unit. Bytes are sent as base64.

    GET    /v1/health                    -> Health            (no token)
    GET    /v1/me                        -> Me
    POST   /v1/jobs                      job mapping -> Submitted (201; header Idempotency-Key)
    GET    /v1/jobs ?state=&user=&project=&queue=&name=&sort=&ascending=&after=&before_seq=&limit=&fold=  -> JobList       (`state` may be repeated)
    GET    /v1/jobs/{id}                 -> JobDetail       (an array's id selects the whole array, here and in the verbs that change jobs)
    PATCH  /v1/jobs/{id}                 UpdateBody -> JobReply
    POST   /v1/jobs/{id}/cancel|hold|release|requeue   WhyBody or nothing -> JobReply
    POST   /v1/jobs/cancel               CancelBody -> JobsReply (all in one step, in the order named)
    GET    /v1/jobs/{id}/why             -> wire.why.WhyReply;  POST /v1/jobs/dry-run  job mapping -> wire.why.DryRunReply
    GET    /v1/jobs/{id}/story ?after=&limit=  -> HistoryReply
    GET    /v1/jobs/{id}/logs ?rank=all|K|supervisor&epoch=&cursor=&limit_bytes=&tail_bytes=  -> LogsReply
           with ?follow=1 or Accept: text/event-stream an SSE stream: `log` LogChunk, `state` StateEvent, `end` EndEvent
    GET    /v1/jobs/{id}/events ?after=  SSE: `story` HistoryLine, `state` StateEvent, `end` EndEvent; /v1/events the same for all jobs
    GET    /v1/jobs/{id}/steps ?after=CURSOR&rank=0|all&limit=  -> StepsReply
    GET    /v1/jobs/{id}/receipt         -> core.accounting.usage_summary.UsageSummary;  /v1/jobs/{id}/usage -> JobUsageView
    GET    /v1/jobs/{id}/files ?path=    -> FilesReply;  /v1/jobs/{id}/files/archive ?path= -> tar
    POST   /v1/jobs/{id}/exec            ExecBody -> ExecOpened
    GET    /v1/exec/{s}/output ?after=&wait_s=  -> ExecOutputReply
    POST   /v1/exec/{s}/input            ExecInputBody -> ExecInputReply;  /v1/exec/{s}/resize ExecResizeBody -> ExecOpened;  DELETE /v1/exec/{s} -> 204
    GET    /v1/nodes                     -> NodeList;  GET /v1/nodes/{id} -> NodeReply
    GET    /v1/reservations              -> ReservationList
    PUT    /v1/reservations/{id}         ReservationBody -> ReservationReply;  DELETE -> 204
    GET    /v1/licences                  -> LicenceList;  PUT /v1/licences/{name} LicenceBody -> LicenceChanged;  DELETE -> LicenceChanged
    GET    /v1/pools                     -> PoolList;  GET /v1/pools/{id} -> PoolReply
    PUT    /v1/pools/{id}                PoolBody -> PoolReply;  DELETE -> PoolRemoved
    GET    /v1/profile                   -> ProfileReply;  PUT  profile mapping -> ProfileReply
    GET    /v1/rules                     -> RulesReply;    PUT  RulesRequest -> RulesReply
    PATCH  /v1/nodes                     LabelsBody -> NodeList (of those named)
    POST   /v1/nodes/{id}/drain          DrainBody -> NodeReply;  /undrain -> NodeReply;  DELETE /v1/nodes/{id} -> NodeRemoved
    PUT    /v1/nodes/{id}/power          PowerBody -> NodeReply;  DELETE -> NodeReply
    GET    /v1/energy ?since_s=&until_s=&by=&limit=  -> EnergyReportView
    GET    /v1/users|projects|queues     -> UserList|ProjectList|QueueList
    GET|PUT /v1/users|projects|queues/{id}   UserBody|ProjectBody|QueueBody -> UserReply|ProjectReply|QueueReply
    PUT    /v1/queues                    QueuesBody -> QueuesApplied (all or nothing)
    GET    /v1/tokens                    -> TokenList (the caller's; all for an admin);  POST TokenBody -> TokenCreated (201)
    DELETE /v1/tokens/{id}               -> 204
    HEAD|PUT /v1/blobs/{sha256}          raw bytes -> BlobReply
    GET    /v1/usage ?since_s=&by=&limit=&waste_first=  -> UsageReportView;  GET /v1/waste ?user=&project=&queue=&kind=&early=&limit= -> WasteView
    GET    /v1/overview                  -> Overview
    POST   /v1/stop                      StopBody -> StopReply

Every error is an ErrorReply with the HTTP status of the core.errors class that has its `code`.
"""
