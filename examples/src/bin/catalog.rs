//! A catalog: many readers and one writer share its pages. Readers overlap; the writer is always
//! alone.
//!
//! A page consists of several related numbers, written one at a time. A read during a write would
//! see a torn page.

use std::{
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Context;
use clap::{Parser, value_parser};
use lock_examples::{run_id, start};
use lock_runtime::{LockClient, LockError, distributed_lock};
use tokio::{
    task::{JoinSet, yield_now},
    time::sleep,
};

/// The number of fields of a page.
const FIELDS: usize = 8;
/// The time for reading a page, long enough for readers to overlap.
const GLANCE: Duration = Duration::from_millis(1);

/// Runs many readers and one writer on the same page, and counts overlaps
///
/// Readers hold the lock of the page together, the writer holds it alone. The run fails if a
/// reader ever saw a half-written page, if the writer overlapped with another holder, or if
/// readers never overlapped.
#[derive(Debug, Parser)]
#[command(name = "catalog")]
struct Options {
    /// The number of concurrent readers
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = value_parser!(u64).range(2..=10_000))]
    readers: u64,

    /// The number of reads of each reader
    #[arg(long, value_name = "N", default_value_t = 250, value_parser = value_parser!(u64).range(1..))]
    reads: u64,

    /// The number of writes
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = value_parser!(u64).range(1..))]
    writes: u64,

    /// Keep the lock in this Redis, such as redis://user:password@host:6379/0, instead of in memory
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
}

/// A page of the catalog, and the counts of its readers and writers.
#[derive(Debug, Default)]
struct Page {
    /// All fields are equal, unless a write is in progress.
    fields: [AtomicU64; FIELDS],
    readers: AtomicU64,
    writers: AtomicU64,
    readers_at_once_max: AtomicU64,
    writer_met: AtomicU64,
    torn_reads: AtomicU64,
}

#[distributed_lock(key = "catalog:{id}", shared, wait = "60s")]
async fn read(id: u64, page: &Page) -> Result<(), LockError> {
    let readers = page.readers.fetch_add(1, Ordering::SeqCst) + 1;
    page.readers_at_once_max
        .fetch_max(readers, Ordering::SeqCst);
    page.writer_met
        .fetch_add(page.writers.load(Ordering::SeqCst), Ordering::SeqCst);
    let edition = page.fields[0].load(Ordering::SeqCst);
    sleep(GLANCE).await;
    if page
        .fields
        .iter()
        .any(|field| field.load(Ordering::SeqCst) != edition)
    {
        page.torn_reads.fetch_add(1, Ordering::SeqCst);
    }
    page.readers.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

#[distributed_lock(key = "catalog:{id}", exclusive, wait = "60s")]
async fn write(id: u64, page: &Page, edition: u64) -> Result<(), LockError> {
    let others = page.writers.fetch_add(1, Ordering::SeqCst);
    page.writer_met.fetch_add(
        others + page.readers.load(Ordering::SeqCst),
        Ordering::SeqCst,
    );
    for field in &page.fields {
        field.store(edition, Ordering::SeqCst);
        yield_now().await;
    }
    page.writers.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

fn main() -> ExitCode {
    let options = Options::parse();
    start("catalog", async move { browse(&options).await })
}

async fn browse(options: &Options) -> anyhow::Result<ExitCode> {
    let Options {
        readers,
        reads,
        writes,
        redis,
    } = options;
    println!(
        "catalog: {readers} readers read a page {reads} times each while one writer rewrites it {writes} times, field by field.\n\
         #[distributed_lock(key = \"catalog:{{id}}\", shared)] admits readers together, `exclusive` admits the writer alone.\n\
         The lock is {}.\n",
        if redis.is_some() {
            "in Redis"
        } else {
            "in memory"
        }
    );
    let url = redis.as_deref().unwrap_or("memory:");
    let locks = LockClient::builder()
        .namespace(run_id("catalog"))
        .connect(url)
        .await?;
    locks.install()?;
    let page = Arc::new(Page::default());
    let met = meet(options, &page).await;
    locks.shutdown().await;
    met?;

    let Page {
        readers_at_once_max,
        writer_met,
        torn_reads,
        ..
    } = &*page;
    let [at_once, met, torn] =
        [readers_at_once_max, writer_met, torn_reads].map(|count| count.load(Ordering::SeqCst));
    println!(
        "reads={} writes={writes} readers_at_once_max={at_once} writer_met={met} torn_reads={torn}",
        readers * reads
    );
    Ok(if at_once > 1 && met == 0 && torn == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs all readers and the writer to completion. The first lock error ends the run.
async fn meet(options: &Options, page: &Arc<Page>) -> anyhow::Result<()> {
    const ID: u64 = 7;
    let mut visitors = JoinSet::new();
    for _ in 0..options.readers {
        let (page, reads) = (page.clone(), options.reads);
        visitors.spawn(async move {
            for _ in 0..reads {
                read(ID, &page).await?;
            }
            Ok::<_, LockError>(())
        });
    }
    let (page, writes) = (page.clone(), options.writes);
    visitors.spawn(async move {
        for edition in 1..=writes {
            write(ID, &page, edition).await?;
        }
        Ok(())
    });
    while let Some(left) = visitors.join_next().await {
        left.context("a reader or the writer panicked")??;
    }
    Ok(())
}
