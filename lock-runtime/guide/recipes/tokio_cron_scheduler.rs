/// `start(locks, "0 0 * * * *", TimeDelta::hours(24))`: each full hour, with a day of look-back.
async fn start(
    locks: LockClient,
    schedule: &str,
    look_back: TimeDelta,
) -> Result<JobScheduler, JobSchedulerError> {
    let ticked = Arc::new(Notify::new());
    let tick = ticked.clone();
    let mut job = Job::new(schedule, move |_, _| tick.notify_one())?;
    let schedule = job.job_data()?.schedule().expect("a job of cron");
    let scheduler = JobScheduler::new().await?;
    scheduler.add(job).await?;
    scheduler.start().await?;
    tokio::spawn(async move {
        loop {
            // At the start as well: for occurrences that no replica has run.
            let now = Utc::now();
            for at in schedule.iter_after(now - look_back).take_while(|at| *at <= now) {
                if let Err(error) = report(&locks, at.timestamp()).await {
                    eprintln!("report {at} is not written: {error:#}");
                }
            }
            ticked.notified().await;
        }
    });
    Ok(scheduler)
}
