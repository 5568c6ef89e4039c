//! A catalog: many readers and one writer share its pages. Readers overlap; the writer never meets anybody.
//!
//! A page is several numbers that belong together, written one at a time. Who reads during a write sees a torn page.

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

/// How many fields a page has.
const FIELDS: usize = 8;
/// How long looking at a page takes, so that readers have a chance to meet.
const GLANCE: Duration = Duration::from_millis(1);

/// Lets many readers and one writer at the same page, and counts who met whom
///
/// Readers hold the lock of the page together, the writer has it alone. It fails if a reader ever saw a half-written page,
/// if the writer met anybody, or if readers never met each other.
#[derive(Debug, Parser)]
#[command(name = "catalog")]
struct Options {
    /// How many readers there are at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = value_parser!(u64).range(2..=10_000))]
    readers: u64,

    /// How often each of them reads
    #[arg(long, value_name = "N", default_value_t = 250, value_parser = value_parser!(u64).range(1..))]
    reads: u64,

    /// How often the writer writes
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = value_parser!(u64).range(1..))]
    writes: u64,

    /// Keep the lock in this Redis, such as redis://user:password@host:6379/0, instead of in memory
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
}

/// A page of the catalog, and a census of who is at it.
#[derive(Debug, Default)]
struct Page {
    /// All the same, as long as nobody is writing.
    fields: [AtomicU64; FIELDS],
    readers: AtomicU64,
    writers: AtomicU64,
    readers_at_once_max: AtomicU64,
    writer_met: AtomicU64,
    torn_reads: AtomicU64,
}

#[distributed_lock(key = "catalog:{id}", read, wait = "60s")]
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

#[distributed_lock(key = "catalog:{id}", write, wait = "60s")]
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
         #[distributed_lock(key = \"catalog:{{id}}\", read)] lets readers in together, `write` lets the writer in alone.\n\
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
    locks.clone().install()?;
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

/// Runs everybody to their end. The first who is refused the lock ends it for all.
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
        left.context("a visitor fell over")??;
    }
    Ok(())
}
