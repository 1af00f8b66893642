// A page that is opened as a file may not start a worker, which Material's
// search needs. So here the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html>";
      this.inside = new Promise((resolve, reject) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.onload = () => resolve(inside);
          script.onerror = () => reject(new Error(`cannot load ${url}`));
          script.src = url;
          inside.document.body.append(script);
        };
      });
      document.body.append(this.frame);
    }

    async postMessage(data) {
      const inside = await this.inside;
      inside.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
