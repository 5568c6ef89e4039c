#[derive(Clone)]
struct Reports {
    locks: LockClient,
    schedule: Schedule, // of the crate cron: "0 0 * * * *"
    look_back: TimeDelta,
}

async fn tick(tick: Tick, reports: Data<Reports>) -> Result<(), BoxDynError> {
    let scheduled = DateTime::<Utc>::from(UNIX_EPOCH + Duration::from_secs(tick.get_timestamp()));
    let missed = reports.schedule.after(&(scheduled - reports.look_back));
    for at in missed.take_while(|at| *at <= scheduled) {
        if let Err(error) = report(&reports.locks, at.timestamp()).await {
            eprintln!("report {at} is not written: {error:#}");
        }
    }
    Ok(())
}

async fn work(reports: Reports) {
    loop {
        let worker = WorkerBuilder::new("reports")
            .backend(CronScheduler::new(reports.schedule.clone()))
            .data(reports.clone())
            .build(tick);
        match worker.run().await {
            Ok(()) => break, // stopped
            Err(error) => eprintln!("the worker is built anew: {error}"),
        }
    }
}
