//! [`forward_link!`](crate::forward_link): the methods that a wrapper around a link passes on unchanged.

/// Implements the named methods of [`Link`](crate::link::Link) by those of a field, in the `impl` block of a wrapper
/// around a link. The methods that the wrapper changes are written beside it.
///
/// ```
/// use xwarp_tcp::{forward_link, link::{Link, QueueId, RingFull, TxFrame}};
///
/// /// Counts the frames that it sends.
/// struct Counting<L>(L, u64);
///
/// impl<L: Link> Link for Counting<L> {
///     forward_link!(0: chunk_bytes, offloads_checksums, is_within_host, tx_available, rx_capacity, rx_available, receive, rx_chunks, rx_head,
///         recycle, alloc, tx_chunks_into, release, flush, steer, unsteer, hand_over);
///
///     fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
///         self.1 += 1;
///         self.0.submit(queue, frame, len)
///     }
/// }
/// ```
#[macro_export]
macro_rules! forward_link {
    ($inner:tt: $($method:ident),+ $(,)?) => {
        $($crate::forward_link!(@$method $inner);)+
    };
    (@chunk_bytes $inner:tt) => {
        fn chunk_bytes(&self) -> usize {
            self.$inner.chunk_bytes()
        }
    };
    (@offloads_checksums $inner:tt) => {
        fn offloads_checksums(&self) -> bool {
            self.$inner.offloads_checksums()
        }
    };
    (@is_within_host $inner:tt) => {
        fn is_within_host(&self) -> bool {
            self.$inner.is_within_host()
        }
    };
    (@tx_available $inner:tt) => {
        fn tx_available(&self) -> usize {
            self.$inner.tx_available()
        }
    };
    (@rx_capacity $inner:tt) => {
        fn rx_capacity(&self) -> usize {
            self.$inner.rx_capacity()
        }
    };
    (@rx_available $inner:tt) => {
        fn rx_available(&self, queue: $crate::link::QueueId) -> usize {
            self.$inner.rx_available(queue)
        }
    };
    (@receive $inner:tt) => {
        fn receive(&mut self, batch: &mut Vec<$crate::link::RxFrame>, max: usize) -> usize {
            self.$inner.receive(batch, max)
        }
    };
    (@rx_chunks $inner:tt) => {
        fn rx_chunks(&self, frame: &$crate::link::RxFrame) -> $crate::link::Pieces<'_> {
            self.$inner.rx_chunks(frame)
        }
    };
    (@rx_head $inner:tt) => {
        fn rx_head(&self, frame: &$crate::link::RxFrame) -> &[u8] {
            self.$inner.rx_head(frame)
        }
    };
    (@recycle $inner:tt) => {
        fn recycle(&mut self, frame: $crate::link::RxFrame) {
            self.$inner.recycle(frame);
        }
    };
    (@reassemble $inner:tt) => {
        fn reassemble(&mut self, frame: $crate::link::RxFrame) -> Option<$crate::link::RxFrame> {
            self.$inner.reassemble(frame)
        }
    };
    (@alloc $inner:tt) => {
        fn alloc(&mut self, len: usize) -> Option<$crate::link::TxFrame> {
            self.$inner.alloc(len)
        }
    };
    (@tx_chunks_into $inner:tt) => {
        fn tx_chunks_into<'a>(
            &'a mut self,
            frame: &mut $crate::link::TxFrame,
            chunks: &mut $crate::link::ChunksMut<'a>,
        ) -> bool {
            self.$inner.tx_chunks_into(frame, chunks)
        }
    };
    (@submit $inner:tt) => {
        fn submit(
            &mut self,
            queue: $crate::link::QueueId,
            frame: &mut $crate::link::TxFrame,
            len: usize,
        ) -> Result<(), $crate::link::RingFull> {
            self.$inner.submit(queue, frame, len)
        }
    };
    (@release $inner:tt) => {
        fn release(&mut self, frame: $crate::link::TxFrame) {
            self.$inner.release(frame);
        }
    };
    (@flush $inner:tt) => {
        fn flush(&mut self) {
            self.$inner.flush();
        }
    };
    (@steer $inner:tt) => {
        fn steer(&mut self, rule: $crate::link::Steer) -> Result<(), $crate::link::SteerError> {
            self.$inner.steer(rule)
        }
    };
    (@unsteer $inner:tt) => {
        fn unsteer(&mut self, rule: $crate::link::Steer) {
            self.$inner.unsteer(rule);
        }
    };
    (@hand_over $inner:tt) => {
        fn hand_over(&mut self, frame: &$crate::link::RxFrame, flow: &$crate::wire::Flow) -> bool {
            self.$inner.hand_over(frame, flow)
        }
    };
}
